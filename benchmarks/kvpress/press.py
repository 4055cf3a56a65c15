"""kvpress's side, run by the interpreter that has kvpress: python -m benchmarks.kvpress.press SPEC.

Prints a line of JSON for each arm as soon as it is done. Nothing of vtoken is imported here.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

MARK: Final = "KVPRESS-RESULT "  # what stands before a line that is one


@torch.inference_mode()
def run_case(model: Any, case: dict[str, Any], press: Any, kept: int) -> dict[str, Any]:
    """Log-probability of what is scored, and whether each token of it was the likeliest; as `cases.Found`.

    As kvpress's own pipeline does it: the context is read under the press, what follows goes on at its true positions.
    """
    from transformers import DynamicCache

    context, given, scored = (torch.tensor([case[name]]) for name in ("context", "given", "scored"))
    length = context.shape[1]
    cache = DynamicCache()
    with press(model) if press is not None else contextlib.nullcontext():
        model.model(input_ids=context, past_key_values=cache)
    if cache.get_seq_length() != kept:
        raise RuntimeError(f"{kept} tokens were to be kept, {cache.get_seq_length()} were")
    rest = torch.cat((given, scored), dim=1)
    positions = torch.arange(length, length + rest.shape[1])[None]
    logits = model(input_ids=rest, past_key_values=cache, position_ids=positions).logits[0]
    logits = logits[given.shape[1] - 1 : -1].double()  # of the tokens before each scored one
    logprobs = logits.log_softmax(dim=1).gather(1, scored[0][:, None])
    return {"logprob": float(logprobs.sum()), "is_greedy": bool((logits.argmax(dim=1) == scored[0]).all())}


def make_press(arm: dict[str, Any]) -> Any:
    """The press of an arm; None for the full cache."""
    if arm["press"] is None:
        return None
    import kvpress

    return getattr(kvpress, arm["press"])(compression_ratio=arm["ratio"], **arm["parameters"])


def run_arm(model: Any, cases: Sequence[dict[str, Any]], arm: dict[str, Any]) -> list[dict[str, Any]]:
    # Attention probabilities are there in eager attention only, and only one press needs them.
    model.set_attn_implementation("eager" if arm["press"] == "ObservedAttentionPress" else "sdpa")
    press = make_press(arm)
    found = []
    for case in cases:
        kept = len(case["context"]) if press is None else arm["kept"]
        found.append(run_case(model, case, press, kept))
    return found


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(spec["model"], local_files_only=True, dtype=torch.float32).eval()
    for arm in spec["arms"]:
        print(MARK + json.dumps({"name": arm["name"], "found": run_arm(model, spec["cases"], arm)}), flush=True)


if __name__ == "__main__":
    main()
