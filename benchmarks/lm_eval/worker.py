"""One arm through lm-eval, run by the interpreter that has it: python -m benchmarks.lm_eval.worker SPEC RESULT."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch


def make_model(spec: dict[str, Any]) -> Any:
    if spec["backend"] == "hf":
        from lm_eval.models.huggingface import HFLM

        return HFLM(pretrained=spec["model"], **spec["settings"])
    from benchmarks.lm_eval.model import VtokenLM

    return VtokenLM(spec["model"], **spec["settings"])


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Task by task: the metrics, and what the model said to every request of every item."""
    from lm_eval import simple_evaluate

    model, found = make_model(spec), {}
    for config in spec["tasks"]:
        start = time.perf_counter()
        result = simple_evaluate(model, tasks=[config], bootstrap_iters=0)
        name = config["task"]
        metrics = {
            key.partition(",")[0]: value
            for key, value in result["results"][name].items()
            if isinstance(value, float) and "stderr" not in key
        }
        items = sorted(result["samples"][name], key=lambda item: item["doc_id"])
        # One list a request, of the one answer to it.
        said = [[answers[0] for answers in item["resps"]] for item in items]
        found[name] = {"metrics": metrics, "said": said, "seconds": time.perf_counter() - start}
    return found


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    Path(sys.argv[2]).write_text(json.dumps(run(spec)))


if __name__ == "__main__":
    main()
