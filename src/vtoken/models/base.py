"""`CausalLM`: the face every model family shows to the worker."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from vtoken.attention.rotation import Rotation
from vtoken.models.spec import ModelSpec
from vtoken.policies.statistics import Statistic

# (layer index, qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]) -> [T, num_heads * head_dim].
# Queries, keys and values of every token side by side, still to be turned by the rotation that the layer's
# `AttentionSpec` names; the tensor may be overwritten. The model never sees the cache.
Attend = Callable[[int, Tensor], Tensor]


# Tables that old versions of transformers stored and that every model computes for itself.
_COMPUTED_TENSORS: Final = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True, eq=False)
class WeightTarget:
    """Where a tensor of the checkpoint goes: some rows of a parameter, so that q, k and v can share one matrix."""

    parameter: nn.Parameter
    rows: slice | None = None  # None = all
    transposed: bool = False  # the checkpoint has [in, out] where the parameter has [out, in]
    offset: float = 0.0  # the checkpoint has this much less, as Gemma's norms, which multiply by 1 + weight

    @property
    def view(self) -> Tensor:
        """The part of the parameter to write; its shape is the one the checkpoint's tensor must have."""
        whole = self.parameter.detach()
        part = whole if self.rows is None else whole[self.rows]
        return part.T if self.transposed else part

    def fill(self, stored: Tensor) -> None:
        """Write the checkpoint's tensor."""
        view = self.view
        view.copy_(stored)
        if self.offset:
            view += self.offset


class CausalLM(nn.Module, ABC):
    """A decoder of T tokens at once, whichever sequences they belong to: only `attend` knows.

    With the kernels of `layers.BATCH_INVARIANT` every row of every result depends on that row's inputs alone, bit for
    bit, whatever T is and wherever the row sits.

    The loader constructs a model twice, first on torch's meta device to hold its shapes against the files: a
    constructor reads the config and allocates, no more.
    """

    spec: ModelSpec
    is_replayable: bool = True
    """Whether `decode` makes the same kernel calls in each step of as many tokens, and computes nothing beside them."""
    missing_statistics: ClassVar[frozenset[type[Statistic]]] = frozenset()
    """What cannot be had of this model, whatever the attention backend gives."""

    @abstractmethod
    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """What enters the first layer: token_ids [T] and positions [T] (int) -> [T, hidden_size], a fresh tensor."""

    def rotations(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Rotation, ...]:
        """The ways in which tokens at positions [T] turn, by the numbers in `AttentionSpec.rotation`.

        `lengths` [T] says what each token's sequence may come to, for models whose rotations depend on it; the others
        take no notice.
        """
        return ()

    @abstractmethod
    def decode(self, x: Tensor, attend: Attend) -> Tensor:
        """Run the layers and the last norm: x [T, hidden_size], which may be overwritten -> [T, hidden_size].

        What happens here depends on the tokens through these arguments alone, so that it can be recorded and replayed.
        """

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The whole decoder: token_ids [T] and positions [T] (int) -> [T, hidden_size]."""
        return self.decode(self.embed(token_ids, positions), attend)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the language model head: [N, hidden_size] -> float32 [N, vocab_size]."""

    @abstractmethod
    def weight_map(self) -> dict[str, WeightTarget]:
        """Name in the checkpoint -> where it goes. Each is loaded exactly once; together they fill the model."""

    def weight_name(self, stored: str) -> str | None:
        """What `weight_map` and `tied_weights` call a tensor that a checkpoint stores as `stored`; None for one that is
        no weight, or a weight of a part that is not run."""
        return None if _COMPUTED_TENSORS.search(stored) else stored

    def tied_weights(self) -> dict[str, str]:
        """Name that a checkpoint may hold without need -> the name whose tensor it repeats."""
        return {}

    def share_prepared(self) -> None:
        """Called once the matrices are prepared: a table tied to one of them may let go of its own memory."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of hidden states, and of weights until `prepare_linears` holds them otherwise."""
        return next(self.parameters()).dtype

    @property
    def num_parameters(self) -> int:
        """Weights of a model as it was loaded, before `prepare_linears`; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of memory the weights take, in whatever form they are held; tied ones count once."""
        plain = sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())
        prepared = [getattr(module, "prepared", None) for module in self.modules()]
        return plain + sum(int(linear.nbytes) for linear in prepared if linear is not None)

    @property
    @abstractmethod
    def flops_per_token(self) -> int:
        """Floating-point operations of the decoder's matrices for one token, without attention and the head."""
