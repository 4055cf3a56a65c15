"""What a KV format costs in quality: perplexity and agreement of the demo model on one text, for each format.

    PYTHONPATH=. python benchmarks/bench_kv_quality.py [--tokens 4096 --context 2048] [--text FILE]

The text is read in windows of `--context` tokens, each computed in chunks of 256 that see the earlier ones through the
cache, as a served prompt does. Against float32 KV: perplexity, the share of tokens at which the likeliest next token is
the same, and the mean KL divergence of the next-token distribution. Bytes are those of a token, scales included.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.plans import Lane, Slice, make_plan
from vtoken.attention.cpu import CpuAttention
from vtoken.attention.metadata import AttentionMetadata
from vtoken.attention.rotation import Rotation
from vtoken.base.kv_format import KV_FORMATS
from vtoken.engine.text import Tokenizer
from vtoken.models.base import CausalLM
from vtoken.models.kernels import COMPILED
from vtoken.models.loader import load_model, resolve_model
from vtoken.models.prepare import prepare_linears
from vtoken.planner.kv_memory import KVShape
from vtoken.worker.kv_store import KVStore

ROOT = Path(__file__).parents[1]
TEXTS = (ROOT.parent / "shared/data/wikitext2_raw/wiki.test.raw", ROOT / "docs/design.md")
BLOCK_SIZE, CHUNK = 16, 256
PAIRS = [*((name, name) for name in KV_FORMATS), ("int8", "fp8_e4m3"), ("float16", "int8")]


@torch.inference_mode()
def logits_of(model: CausalLM, token_ids: list[int], formats: tuple[str, str]) -> Tensor:
    """[T, vocab_size] of one sequence, computed chunk by chunk through a cache of these formats."""
    spec, backend = model.spec, CpuAttention()
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    store = KVStore(KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, *formats), num_blocks, BLOCK_SIZE)
    lane, logits = Lane(BLOCK_SIZE, list(range(num_blocks))), []
    for begin in range(0, len(token_ids), CHUNK):
        part = Slice(lane, token_ids[begin : begin + CHUNK])
        plan = make_plan([part])
        meta, slots = AttentionMetadata.from_plan(plan), torch.from_numpy(plan.write_slots)
        positions = torch.from_numpy(meta.positions)
        rotations = model.rotations(positions)

        def attend(
            layer: int,
            qkv: Tensor,
            rotations: tuple[Rotation, ...] = rotations,
            meta: AttentionMetadata = meta,
            slots: Tensor = slots,
        ) -> Tensor:
            facts, cache = spec.layers[layer], store.layers[layer]
            heads = backend.write(qkv, facts.pick(rotations), cache, slots)
            return backend.attend(facts, *heads, cache, meta).flatten(1)

        logits.append(model.logits(model.hidden_states(torch.tensor(part.token_ids), positions, attend)))
        part.commit()
    return torch.cat(logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, default=next((path for path in TEXTS if path.is_file()), None))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args()
    folder = resolve_model(args.model)
    model = load_model(folder, kernels=COMPILED)
    prepare_linears(model)
    tokenizer = Tokenizer.from_folder(folder, model.spec.vocab_size)
    token_ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
    windows = [token_ids[begin : begin + args.context] for begin in range(0, len(token_ids), args.context)]
    windows = [window for window in windows if len(window) > 1]
    print(f"{args.model}, {sum(map(len, windows))} tokens of {args.text.name} in windows of {args.context}")
    print("| keys / values | bytes a token | of float16 | perplexity | same likeliest token | mean KL |")
    print("|---|---|---|---|---|---|")

    exact = [logits_of(model, window, ("float32", "float32")).log_softmax(dim=1) for window in windows]
    shape = (model.spec.num_layers, model.spec.num_kv_heads, model.spec.head_dim)
    half = KVShape(*shape, "float16").bytes_per_token
    for formats in PAIRS:
        loss, same, divergence, count = 0.0, 0, 0.0, 0
        for window, expected in zip(windows, exact, strict=True):
            found = logits_of(model, window, formats).log_softmax(dim=1)
            loss -= float(found[:-1].gather(1, torch.tensor(window[1:])[:, None]).double().sum())
            same += int((found.argmax(dim=1) == expected.argmax(dim=1)).sum())
            divergence += float((expected.exp() * (expected - found)).sum(dim=1).double().sum())
            count += len(window)
        num_bytes = KVShape(*shape, *formats).bytes_per_token
        perplexity = math.exp(loss / (count - len(windows)))
        name = formats[0] if formats[0] == formats[1] else " / ".join(formats)
        print(
            f"| {name} | {num_bytes:,} | {num_bytes / half:.0%} | {perplexity:.3f} | {same / count:.2%} | "
            f"{divergence / count:.5f} |"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
