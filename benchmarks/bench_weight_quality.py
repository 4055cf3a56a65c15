"""What a linear kernel costs in quality: the demo model's logits on one text against torch's float32 linears.

    PYTHONPATH=. python benchmarks/bench_weight_quality.py [--tokens 512]

The largest and the mean difference of a logit, and the share of tokens at which the likeliest next token is the same.
"auto" is what an engine takes unasked; the others round the weights, and are taken only by their names.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.bench_kv_quality import TEXTS, logits_of
from vtoken.engine.text import Tokenizer
from vtoken.models.kernels import COMPILED
from vtoken.models.loader import load_model, resolve_model
from vtoken.models.prepare import prepare_linears

FLOAT32 = ("float32", "float32")
KINDS: list[tuple[str, str | None]] = [
    ("auto", None),
    ("vtoken_f32", None),
    ("vtoken_f16", None),
    ("vtoken_bf16", None),
    ("vtoken_int8", "int8"),
    ("fbgemm_int8", "int8"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, default=next((path for path in TEXTS if path.is_file()), None))
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    folder = resolve_model(args.model)

    plain = load_model(folder, kernels=COMPILED)
    tokenizer = Tokenizer.from_folder(folder, plain.spec.vocab_size)
    token_ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
    exact = logits_of(plain, token_ids, FLOAT32)
    print(f"{args.model}, {len(token_ids)} tokens of {args.text.name}")
    print("| linear backend | MiB of weights | largest difference | mean | same likeliest token |")
    print("|---|---|---|---|---|")
    for backend, quantization in KINDS:
        model = load_model(folder, kernels=COMPILED)
        prepare_linears(model, backend=backend, quantization=quantization)
        found = logits_of(model, token_ids, FLOAT32)
        difference = (found - exact).abs()
        same = float((found.argmax(dim=1) == exact.argmax(dim=1)).float().mean())
        size = model.num_weight_bytes / 2**20
        print(f"| {backend} | {size:.0f} | {difference.max():.2g} | {difference.mean():.2g} | {same:.1%} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
