"""A model without matrices of its own, for tests of what surrounds a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vtoken.attention.spec import AttentionSpec
from vtoken.models.base import Attend, CausalLM, WeightTarget
from vtoken.models.spec import ModelSpec


class FakeModel(CausalLM):
    """Embeddings that are queries, keys and values at once; the logits are the first numbers of the hidden state.

    It keeps what it was asked for: `seen` holds (token ids, positions) of each forward pass, `logit_rows` the number of
    rows of each call of `logits`.
    """

    def __init__(
        self, num_layers: int = 2, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 8, vocab_size: int = 32
    ) -> None:
        super().__init__()
        width = num_heads * head_dim
        assert vocab_size <= width, "logits are part of the hidden state"
        self.spec = ModelSpec(
            architecture="FakeForCausalLM",
            vocab_size=vocab_size,
            hidden_size=width,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=4096,
            layers=(AttentionSpec(scale=0.5, rotation=None),) * num_layers,
            eos_token_ids=frozenset(),
            bos_token_id=None,
        )
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(vocab_size, width, generator=generator), requires_grad=False)
        self.seen: list[tuple[list[int], list[int]]] = []
        self.logit_rows: list[int] = []

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        self.seen.append((token_ids.tolist(), positions.tolist()))
        # Positions turn the features, so that the order of the tokens counts.
        return self.embedding[token_ids] * torch.cos(positions[:, None] * torch.linspace(0, 1, self.spec.hidden_size))

    def decode(self, x: Tensor, attend: Attend) -> Tensor:
        spec, hidden = self.spec, x
        for layer in range(spec.num_layers):
            q = hidden.view(-1, spec.num_heads, spec.head_dim)
            kv = q[:, :: spec.num_heads // spec.num_kv_heads]
            hidden = hidden + attend(layer, torch.cat([q, kv, kv + 1], dim=1).flatten(1))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self.logit_rows.append(len(hidden))
        return hidden[:, : self.spec.vocab_size].float()

    def weight_map(self) -> dict[str, WeightTarget]:
        return {"embedding": WeightTarget(self.embedding)}

    @property
    def flops_per_token(self) -> int:
        return 0
