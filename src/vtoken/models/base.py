"""`CausalLM`: the face every model family shows to the worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtoken.models.spec import ModelSpec

# (layer index, q [T, num_heads, head_dim], k [T, num_kv_heads, head_dim], v like k) -> [T, num_heads, head_dim].
# Queries and keys carry their rotation already; no input need be contiguous. The model never sees the cache.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class WeightTarget:
    """Where a tensor of the checkpoint goes: some rows of a parameter, so that q, k and v can share one matrix."""

    parameter: nn.Parameter
    rows: slice | None = None  # None = all

    @property
    def view(self) -> Tensor:
        """The part of the parameter to write; its shape is the one the checkpoint's tensor must have."""
        whole = self.parameter.detach()
        return whole if self.rows is None else whole[self.rows]


class CausalLM(nn.Module, ABC):
    """A decoder of T tokens at once, whichever sequences they belong to: only `attend` knows.

    With the kernels of `layers.BATCH_INVARIANT` every row of every result depends on that row's inputs alone, bit for
    bit, whatever T is and wherever the row sits.

    The loader constructs a model twice, first on torch's meta device to hold its shapes against the files: a
    constructor reads the config and allocates, no more.
    """

    spec: ModelSpec

    @abstractmethod
    def hidden_states(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the decoder, last norm included: token_ids [T] and positions [T] (int) -> [T, hidden_size]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the language model head: [N, hidden_size] -> float32 [N, vocab_size]."""

    @abstractmethod
    def weight_map(self) -> dict[str, WeightTarget]:
        """Name in the checkpoint -> where it goes. Each is loaded exactly once; together they fill the model."""

    def tied_weights(self) -> dict[str, str]:
        """Name that a checkpoint may hold without need -> the name whose tensor it repeats."""
        return {}

    @property
    def dtype(self) -> torch.dtype:
        """Data type of weights, hidden states, keys and values."""
        return next(self.parameters()).dtype

    @property
    def num_parameters(self) -> int:
        """Weights held in memory; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of memory the weights take; tied ones count once."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())

    @property
    @abstractmethod
    def flops_per_token(self) -> int:
        """Floating-point operations of the decoder's matrices for one token, without attention and the head."""
