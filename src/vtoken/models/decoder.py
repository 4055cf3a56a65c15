"""`DecoderLM`: what families have in common whose head may be their embedding table."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from vtoken.models.base import CausalLM
from vtoken.models.kernels import Kernels
from vtoken.models.layers import Embedding, Linear


class DecoderLM(CausalLM):
    """An embedding table, layers, and a head. A subclass sets `spec` and `layers`, and calls `_make_ends`."""

    embedding_name: ClassVar[str]
    """What checkpoints call the embedding table, without `.weight`."""

    layers: nn.ModuleList
    embed_tokens: Embedding
    lm_head: Linear

    def _make_ends(self, width: int, *, is_tied: bool, dtype: torch.dtype, kernels: Kernels) -> None:
        """Table and head of embeddings of this width, one matrix if tied."""
        self.embed_tokens = Embedding(self.spec.vocab_size, width, dtype=dtype)
        self.lm_head = Linear(width, self.spec.vocab_size, bias=False, dtype=dtype, kernels=kernels)
        self.is_tied = is_tied
        self._dtype = dtype
        if is_tied:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype  # not every parameter has it

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.lm_head(hidden)
        return out.float()

    def tied_weights(self) -> dict[str, str]:
        return {"lm_head.weight": f"{self.embedding_name}.weight"} if self.is_tied else {}

    def share_prepared(self) -> None:
        if self.is_tied and self.lm_head.prepared is not None:
            self.embed_tokens.share(self.lm_head.prepared)

    @property
    def flops_per_token(self) -> int:
        matrices = (module for module in self.layers.modules() if isinstance(module, Linear))
        return 2 * sum(matrix.in_features * matrix.out_features for matrix in matrices)
