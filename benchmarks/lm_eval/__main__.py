"""The one command: sets up lm-eval, runs the tasks through its own back end and through vtoken, writes the tables."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.lm_eval import environment
from benchmarks.lm_eval.report import BEGIN, END, TRANSFORMERS, VTOKEN, page
from benchmarks.lm_eval.tasks import Task, make_tasks
from benchmarks.pages import write_between_markers
from benchmarks.peers import machine
from benchmarks.peers.environments import SetupError
from vtoken.base.errors import VtokenError
from vtoken.evals.squad import read_questions
from vtoken.evals.texts import read_text
from vtoken.models.catalog import get_model

ROOT: Final = environment.ROOT
XQUAD: Final = ROOT.parent / "shared/data/xquad/xquad.en.json"
MODEL: Final = "smollm2-135m"
MAX_MODEL_LEN: Final = 1024  # longer than any of the texts
STRIDE: Final = 16  # tokens from one eviction to the next, in prompts too: they are short


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lm_eval", description=__doc__)
    parser.add_argument(
        "--limit", type=int, default=60, help="items of a task; of the running text a fifth (default 60)"
    )
    parser.add_argument("--policy", help="a third arm, under this policy: 'h2o', 'streaming_llm', ...")
    parser.add_argument("--budget", type=int, default=64, help="tokens that stay under --policy (default 64)")
    parser.add_argument(
        "--questions", type=Path, help="SQuAD's JSON (default: XQuAD of ../shared/data, if it is there)"
    )
    parser.add_argument("--smoke", action="store_true", help="two items a task, no page written")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md", help="where the tables go")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.limit = 2
    if args.limit < 1 or args.budget < 1:
        parser.error("--limit and --budget: expected numbers from 1 up")
    return args


def arms_of(args: argparse.Namespace, model: Path) -> dict[str, dict[str, Any]]:
    """Name -> what the worker makes its model of."""
    ours = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    theirs = {
        "dtype": "float32",
        "softmax_dtype": "float64",  # in float32, log-probabilities of a large vocabulary are 1e-5 off, token by token
        "device": "cpu",
        "batch_size": 4,
        "max_length": MAX_MODEL_LEN - 2,
    }
    arms = {
        TRANSFORMERS: {"backend": "hf", "model": str(model), "settings": theirs},
        VTOKEN: {"backend": "vtoken", "model": str(model), "settings": ours},
    }
    if args.policy is not None:
        retention = {"kv_policy": args.policy, "kv_budget": args.budget, "kv_trigger": "always"}
        strides = {"kv_stride": STRIDE, "kv_prefill_stride": STRIDE}
        name = f"{VTOKEN}, {args.policy} {args.budget}"
        arms[name] = arms[VTOKEN] | {"settings": ours | retention | strides}
    return arms


def run_arm(name: str, arm: dict[str, Any], tasks: Sequence[Task], folder: Path) -> dict[str, Any]:
    """What the worker found. Raises RuntimeError with its last line if it fails."""
    threads = int(os.environ.get("OMP_NUM_THREADS", machine.num_threads()))
    documents = folder / "documents"
    documents.mkdir(parents=True, exist_ok=True)
    spec, result, log = folder / "spec.json", folder / "result.json", folder / "worker.log"
    spec.write_text(json.dumps(arm | {"threads": threads, "tasks": [task.written_to(documents) for task in tasks]}))
    result.unlink(missing_ok=True)
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    }
    command = [str(environment.python()), "-m", "benchmarks.lm_eval.worker", str(spec), str(result)]
    with log.open("w") as file:
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise RuntimeError(f"{name} failed: {lines[-1] if lines else code} (log: {log})")
    found: dict[str, Any] = json.loads(result.read_text())
    print(f"{name}: " + ", ".join(f"{task} {each['seconds']:.0f} s" for task, each in found.items()), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        environment.set_up()
        model = get_model(MODEL, progress=lambda _: None)
        source = args.questions or (XQUAD if XQUAD.is_file() else None)
        questions = [] if source is None else read_questions(source)
        tasks = make_tasks(read_text(None).content, questions, args.limit)
    except (SetupError, VtokenError) as error:
        print(error, file=sys.stderr)
        return 1
    left_out = "" if questions else f"answers, since there is no {XQUAD} (give --questions)"
    if left_out:
        print(f"left out: {left_out}")
    found = {name: run_arm(name, arm, tasks, environment.folder()) for name, arm in arms_of(args, model).items()}
    facts = machine.facts()
    options = f" --limit {args.limit}" + (f" --policy {args.policy} --budget {args.budget}" if args.policy else "")
    options += f" --questions {args.questions.name}" if args.questions else ""
    about = {
        "command": f"python -m benchmarks.lm_eval{options}",
        "date": datetime.date.today().isoformat(),
        "model": MODEL,
        "lm_eval": environment.LM_EVAL.replace("==", " "),
        "transformers": environment.TRANSFORMERS[0].replace("==", " "),
        "machine": f"{facts['cores']} cores of {facts['cpu']}",
        "left_out": left_out,
    }
    text = page(tasks, found, about)
    if args.smoke:
        print(text)
    else:
        write_between_markers(args.page, text, BEGIN, END)
        print(f"wrote {args.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
