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
    is_exempt = [quantization is not None and linear.is_delicate for linear in linears]
    named = [shape for shape, exempt in zip(shapes, is_exempt, strict=True) if not exempt]
    plan = choose(named, override=backend, quantization=quantization)
    exact = choose([shape for shape, exempt in zip(shapes, is_exempt, strict=True) if exempt])
    for linear, shape, exempt in zip(linears, shapes, is_exempt, strict=True):
        linear.prepare((exact if exempt else plan).kernels[shape])
    model.share_prepared()
    return LinearPlan(exact.kernels | plan.kernels, exact.timings | plan.timings)
