"""The one command: sets up kvpress, runs what has no figure yet on both sides, writes the table."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.kvpress import environment
from benchmarks.kvpress.cases import CONTINUATION, Case, Found, make_cases, summary
from benchmarks.kvpress.ours import run_cases
from benchmarks.kvpress.pairs import PAIRS, Pair, compression_ratio
from benchmarks.kvpress.press import MARK
from benchmarks.kvpress.report import FULL, Line, page, write_between_markers
from benchmarks.peers.environments import SetupError
from benchmarks.peers.machine import num_threads
from vtoken.base.errors import VtokenError
from vtoken.engine.llm import LLM
from vtoken.engine.text import Tokenizer
from vtoken.evals.texts import read_text
from vtoken.models.catalog import get_model

ROOT = Path(__file__).resolve().parents[2]
WIKITEXT = ROOT.parent / "shared/data/wikitext2_raw/wiki.test.raw"
MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Arm:
    """One pair at one number of kept tokens; without a pair the full cache."""

    pair: Pair | None
    kept: int

    @property
    def name(self) -> str:
        return FULL if self.pair is None else f"{self.pair.press} {self.kept}"


class Records:
    """What was found already, a file an arm and side. A record belongs to all that decides it."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self._folder = folder / digest
        self._folder.mkdir(parents=True, exist_ok=True)

    def _path(self, side: str, arm: str) -> Path:
        return self._folder / f"{side} {arm}.json"

    def get(self, side: str, arm: str) -> list[Found] | None:
        path = self._path(side, arm)
        return [Found(**each) for each in json.loads(path.read_text())] if path.is_file() else None

    def put(self, side: str, arm: str, found: Sequence[Found]) -> None:
        path = self._path(side, arm)
        path.with_suffix(".new").write_text(json.dumps([asdict(each) for each in found]))
        path.with_suffix(".new").replace(path)  # all of it or nothing


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kvpress", description=__doc__)
    presses = [pair.press for pair in PAIRS]
    parser.add_argument("--kept", type=int, nargs="+", default=[512, 256, 128], help="tokens that stay of a context")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a context (default 1024)")
    parser.add_argument("--windows", type=int, default=8, help="contexts for perplexity (default 8)")
    parser.add_argument("--needles", type=int, default=4, help="needles at each of five depths (default 4)")
    parser.add_argument("--presses", nargs="+", choices=presses, default=presses, metavar="PRESS")
    parser.add_argument("--text", type=Path, help="what is read (default: WikiText-2 of ../shared/data, or our own)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no page written")
    parser.add_argument("--fresh", action="store_true", help="forget all figures and start over")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md", help="where the table goes")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.kept, args.context, args.windows, args.needles = [160], 320, 1, 1
    if any(not 0 < kept < args.context for kept in args.kept):
        parser.error(f"--kept: expected numbers of tokens below --context {args.context}")
    return args


def run_theirs(
    arms: Sequence[Arm], cases: Sequence[Case], model: Path, folder: Path
) -> Iterator[tuple[str, list[Found]]]:
    """(name, what was found) of each arm as it is done. Raises RuntimeError with the last line if the process fails."""
    spec = {
        "model": str(model),
        "threads": int(os.environ.get("OMP_NUM_THREADS", num_threads())),
        "cases": [case.to_json() for case in cases],
        "arms": [_spec_of(arm, len(cases[0].context)) for arm in arms],
    }
    path, log = folder / "spec.json", folder / "stderr.log"
    path.write_text(json.dumps(spec))
    command = [str(environment.python()), "-m", "benchmarks.kvpress.press", str(path)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(MARK):
                    record = json.loads(line.removeprefix(MARK))
                    yield record["name"], [Found(**each) for each in record["found"]]
        finally:
            if sys.exc_info()[0] is not None:
                process.kill()
    if process.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise RuntimeError(f"kvpress failed: {lines[-1] if lines else process.returncode} (log: {log})")


def _spec_of(arm: Arm, context: int) -> dict[str, Any]:
    pair = arm.pair
    return {
        "name": arm.name,
        "press": None if pair is None else pair.press,
        "parameters": {} if pair is None else dict(pair.parameters),
        "kept": arm.kept,
        "ratio": compression_ratio(context, arm.kept),
    }


def main() -> int:
    args = parse()
    try:
        environment.set_up()
        model = get_model(MODEL, progress=lambda _: None)
        text = read_text(args.text or (WIKITEXT if WIKITEXT.is_file() else None))
        continuation = 32 if args.smoke else CONTINUATION
        sizes = {"context": args.context, "windows": args.windows, "needles": args.needles}
        cases = make_cases(Tokenizer.from_folder(model), text, continuation=continuation, **sizes)
    except (SetupError, VtokenError) as error:
        print(error, file=sys.stderr)
        return 1
    records_folder = environment.folder() / "records"
    if args.fresh:
        shutil.rmtree(records_folder, ignore_errors=True)
    pairs = [pair for pair in PAIRS if pair.press in args.presses]
    arms = [Arm(None, args.context), *(Arm(pair, kept) for kept in args.kept for pair in pairs)]
    shared = {"cases": [case.to_json() for case in cases], "model": MODEL}
    their_key = shared | {"recipe": environment.REQUIREMENTS, "pairs": [str(pair) for pair in PAIRS]}
    theirs = Records(records_folder, their_key)
    ours = Records(records_folder, shared | {"pairs": [str(pair) for pair in PAIRS], "source": source_digest()})
    missing = [arm for arm in arms if theirs.get("kvpress", arm.name) is None]
    if missing:
        for name, found in run_theirs(missing, cases, model, environment.folder()):
            theirs.put("kvpress", name, found)
            print(f"kvpress {name}: {_told(cases, found)}", flush=True)
    missing = [arm for arm in arms if ours.get("vtoken", arm.name) is None]
    if missing:
        with LLM(str(model), max_model_len="auto") as llm:
            for arm in missing:
                policy = None if arm.pair is None else arm.pair.policy_for(args.context)
                found = run_cases(llm, cases, policy, arm.kept)
                ours.put("vtoken", arm.name, found)
                print(f"vtoken {arm.name}: {_told(cases, found)}", flush=True)
    lines = []
    for arm in arms:
        press, policy = (FULL, FULL) if arm.pair is None else (arm.pair.press, arm.pair.policy.partition(":")[0])
        sides = [records.get(side, arm.name) for records, side in ((theirs, "kvpress"), (ours, "vtoken"))]
        lines.append(Line(press, policy, arm.kept, *(summary(cases, found or []) for found in sides)))
    about = sizes | {
        "date": datetime.date.today().isoformat(),
        "model": MODEL,
        "kvpress": environment.REQUIREMENTS[1].replace("==", " "),
        "text": text.name,
        "continuation": continuation,
        "windows": sum(case.kind == "perplexity" for case in cases),
        "needles": sum(case.kind == "needle" for case in cases),
    }
    if args.smoke:
        print(page(lines, about))
    else:
        write_between_markers(args.page, page(lines, about))
        print(f"wrote {args.page}")
    return 0


def source_digest() -> str:
    """Of all that decides our figures: the package's own source."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src" / "vtoken").rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _told(cases: Sequence[Case], found: Sequence[Found]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in summary(cases, found).items())


if __name__ == "__main__":
    sys.exit(main())
