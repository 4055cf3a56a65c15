"""The building blocks of a decoder.

`__call__ = forward` in each of them leaves out the hooks of `nn.Module`, which nobody uses here: they cost two
microseconds a call, and a step makes hundreds of calls.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtoken.kernels.fused import Activation
from vtoken.linear.base import LinearKernel, PreparedLinear
from vtoken.models.base import WeightTarget
from vtoken.models.kernels import Kernels


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A weight to be filled by the loader; inference only, so no gradient. Its memory is untouched until then."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """`x @ weight.T + bias`.

    Once loaded, `prepare` may hand the weight to a faster kernel, which holds it in a form of its own. A weight that
    `is_delicate` keeps its numbers whatever quantisation is asked for.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        kernels: Kernels,
        is_delicate: bool = False,
    ) -> None:
        super().__init__()
        self.is_delicate = is_delicate
        self.in_features, self.out_features = in_features, out_features
        self.weight: nn.Parameter | None = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias: nn.Parameter | None = empty_parameter(out_features, dtype=dtype) if bias else None
        self._linear = kernels.linear
        self.prepared: PreparedLinear | None = None

    def forward(self, x: Tensor) -> Tensor:  # [T, in_features] -> [T, out_features]
        if self.prepared is not None:
            return self.prepared(x)
        assert self.weight is not None
        return self._linear(x, self.weight, self.bias)

    __call__ = forward

    def prepare(self, kernel: LinearKernel) -> PreparedLinear:
        """Compute with `kernel` from now on, and let go of the weight: its memory returns unless something shares it.

        Raises ConfigError for numbers that the kernel cannot hold.
        """
        assert self.weight is not None, "prepared twice"
        self.prepared = kernel.prepare(self.weight.detach(), None if self.bias is None else self.bias.detach())
        self.weight = self.bias = None
        return self.prepared

    def weight_map(self, name: str, rows: slice | None = None, *, transposed: bool = False) -> dict[str, WeightTarget]:
        """Targets of the checkpoint's layer `name`, which fills these rows of ours (None = all) and may have its matrix
        as [in, out]."""
        targets = {} if self.weight is None else {f"{name}.weight": WeightTarget(self.weight, rows, transposed)}
        return targets if self.bias is None else targets | {f"{name}.bias": WeightTarget(self.bias, rows)}


class Embedding(nn.Module):
    """Token id -> row of `weight`, or of the prepared weight of the head it is tied to."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = empty_parameter(vocab_size, hidden_size, dtype=dtype)
        self._prepared: PreparedLinear | None = None

    def forward(self, token_ids: Tensor) -> Tensor:  # [T] -> [T, hidden_size]
        if self._prepared is not None:
            return self._prepared.rows(token_ids)
        assert self.weight is not None
        return F.embedding(token_ids, self.weight)

    __call__ = forward

    def weight_map(self, name: str) -> dict[str, WeightTarget]:
        assert self.weight is not None
        return {f"{name}.weight": WeightTarget(self.weight)}

    def share(self, prepared: PreparedLinear) -> None:
        """Read rows from a tied head's weight, where that kernel gives them back, and let go of the own table."""
        if prepared.has_rows:
            self._prepared, self.weight = prepared, None


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, the mean square in float32 (Zhang and Sennrich, arXiv 1910.07467), behind a residual.

    `plus_one`: checkpoints hold `weight - 1`, as Gemma's do. Ours is then float32 in a model of any dtype: the sum
    would lose digits in a narrow one, and Gemma multiplies before it rounds.
    """

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, kernels: Kernels, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(width, dtype=torch.float32 if plus_one else dtype)
        self.eps = eps
        self._offset = 1.0 if plus_one else 0.0
        self._add_rms_norm = kernels.add_rms_norm

    def forward(self, residual: Tensor, x: Tensor | None = None) -> Tensor:
        """Add x to the residual, in place, and return the sum's norm: [T, width] each."""
        return self._add_rms_norm(residual, x, self.weight, self.eps)

    __call__ = forward

    def weight_map(self, name: str) -> dict[str, WeightTarget]:
        return {f"{name}.weight": WeightTarget(self.weight, offset=self._offset)}


class HeadNorms(nn.Module):
    """RMS norms of every query and every key by itself, before they turn; `plus_one` as in `RMSNorm`."""

    def __init__(
        self,
        head_dim: int,
        num_kv_heads: int,
        eps: float,
        *,
        dtype: torch.dtype,
        kernels: Kernels,
        plus_one: bool = False,
    ) -> None:
        super().__init__()
        self.q_norm = RMSNorm(head_dim, eps, dtype=dtype, kernels=kernels, plus_one=plus_one)
        self.k_norm = RMSNorm(head_dim, eps, dtype=dtype, kernels=kernels, plus_one=plus_one)
        self._num_kv_heads, self._eps = num_kv_heads, eps
        self._norm_heads = kernels.norm_heads

    def forward(self, qkv: Tensor) -> Tensor:
        """[T, (num_heads + 2 * num_kv_heads) * head_dim], in place."""
        return self._norm_heads(qkv, self.q_norm.weight, self.k_norm.weight, self._num_kv_heads, self._eps)

    __call__ = forward

    def weight_map(self) -> dict[str, WeightTarget]:
        return self.q_norm.weight_map("q_norm") | self.k_norm.weight_map("k_norm")


class LayerNorm(nn.Module):
    """`(x - mean) / std * weight + bias` in float32 (Ba et al., arXiv 1607.06450), behind a residual."""

    def __init__(
        self, width: int, eps: float, *, dtype: torch.dtype, kernels: Kernels, has_weights: bool = True
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(width, dtype=dtype) if has_weights else None
        self.bias = empty_parameter(width, dtype=dtype) if has_weights else None
        self.eps = eps
        self._add_layer_norm = kernels.add_layer_norm

    def forward(self, residual: Tensor, x: Tensor | None = None) -> Tensor:
        """Add x to the residual, in place, and return the sum's norm: [T, width] each."""
        return self._add_layer_norm(residual, x, self.weight, self.bias, self.eps)

    __call__ = forward

    def weight_map(self, name: str) -> dict[str, WeightTarget]:
        parameters = {"weight": self.weight, "bias": self.bias}
        return {f"{name}.{kind}": WeightTarget(p) for kind, p in parameters.items() if p is not None}


class MLP(nn.Module):
    """`down(f(up(x)))`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        bias: bool,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias, dtype=dtype, kernels=kernels)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, kernels=kernels)
        self.activation: Activation = activation
        self._activate = kernels.activate

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        hidden: Tensor = self.down_proj(self._activate(self.up_proj(x), self.activation))
        return hidden

    __call__ = forward


def matrix_flops(module: nn.Module) -> int:
    """Floating-point operations of all matrices inside for one token."""
    return 2 * sum(each.in_features * each.out_features for each in module.modules() if isinstance(each, Linear))


class GatedMLP(nn.Module):
    """`down(f(gate(x)) * up(x))` with gate and up in one matrix (SwiGLU, GEGLU: Shazeer, arXiv 2002.05202)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        kernels: Kernels,
        activation: Activation = "silu",
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias, dtype=dtype, kernels=kernels)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, kernels=kernels)
        self.activation: Activation = activation
        self._activate_and_mul = kernels.activate_and_mul

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        gated: Tensor = self._activate_and_mul(self.gate_up_proj(x), self.activation)
        hidden: Tensor = self.down_proj(gated)
        return hidden

    __call__ = forward

    def weight_map(self, is_fused: bool = False) -> dict[str, WeightTarget]:
        """Names below `mlp.`; `is_fused`: of a checkpoint that has gate and up in one matrix too."""
        width = self.down_proj.in_features
        if is_fused:
            return {**self.gate_up_proj.weight_map("gate_up_proj"), **self.down_proj.weight_map("down_proj")}
        return {
            **self.gate_up_proj.weight_map("gate_proj", slice(0, width)),
            **self.gate_up_proj.weight_map("up_proj", slice(width, None)),
            **self.down_proj.weight_map("down_proj"),
        }
