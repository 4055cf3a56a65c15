"""Hand a loaded model's matrices to the linear kernels that are quickest on this machine."""

from __future__ import annotations

from vtoken.linear.choose import LinearPlan, choose
from vtoken.linear.holding import shape_of
from vtoken.models.base import CausalLM
from vtoken.models.layers import Linear


def prepare_linears(model: CausalLM, *, backend: str = "auto", quantization: str | None = None) -> LinearPlan:
    """Choose a kernel for each shape and pack the weights for it, one layer after the other, so that the peak is the
    model and one layer. Raises ConfigError for a choice that cannot be had; see `linear.choose`.
    """
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    shapes = []
    for linear in linears:
        assert linear.weight is not None
        shapes.append(shape_of(linear.weight.detach(), None if linear.bias is None else linear.bias.detach()))
    plan = choose(shapes, override=backend, quantization=quantization)
    for linear, shape in zip(linears, shapes, strict=True):
        linear.prepare(plan.kernels[shape])
    model.share_prepared()
    return plan
