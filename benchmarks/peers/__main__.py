"""The one command: sets up what is missing, runs what has no figure yet, writes tables and JSON."""

from __future__ import annotations

import argparse
import fcntl
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import environments, machine
from benchmarks.peers.cell import ROOT, end_on_sigterm
from benchmarks.peers.engines import ENGINES
from benchmarks.peers.figures import Goal
from benchmarks.peers.report import Report, write_between_markers, write_json
from benchmarks.peers.sitting import Options, Sitting
from benchmarks.peers.workloads import SMOKE, WORKLOADS


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Exits with a message for a wrong one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    choose = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--workloads", choices=list(WORKLOADS), default=list(WORKLOADS), **choose)  # type: ignore[arg-type]
    parser.add_argument("--engines", choices=list(ENGINES), default=list(ENGINES), **choose)  # type: ignore[arg-type]
    parser.add_argument("--rounds", type=int, default=3, help="runs of each cell (default 3)")
    parser.add_argument("--info-rounds", type=int, default=1, help="of engines that no target names (default 1)")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds a cell may take, start included (default 600)"
    )
    parser.add_argument("--rate", type=float, help="W5's requests a second; by default the slower peer just keeps up")
    parser.add_argument("--goal-first-token", type=float, default=2.0, help="W5: seconds to a good first token")
    parser.add_argument("--goal-between", type=float, default=0.2, help="W5: seconds a token, on average")
    parser.add_argument("--fresh", action="store_true", help="forget all figures and start over")
    parser.add_argument("--retry", action="store_true", help="try cells again that failed")
    parser.add_argument(
        "--max-others",
        type=float,
        metavar="SHARE",
        help="run cells again in which others took more of the CPU, say 0.1",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does every cell work? Writes no page")
    parser.add_argument("--setup-only", action="store_true", help="environments and models, no figures")
    parser.add_argument("--no-setup", action="store_true", help="take the environments as they are")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md", help="where the tables go")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "docs" / "results" / "peers.json", help="where the data goes"
    )
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    end_on_sigterm()
    sizes = SMOKE if args.smoke else WORKLOADS
    engines = [ENGINES[name] for name in ENGINES if name in args.engines]
    if not machine.is_zen_with_avx512():  # AMD's kernels
        engines = [engine for engine in engines if not engine.settings.get("zentorch")]
    options = Options(
        workloads=[sizes[name] for name in sizes if name in args.workloads],
        engines=engines,
        rounds=1 if args.smoke else args.rounds,
        info_rounds=args.info_rounds,
        timeout_s=args.timeout,
        goal=Goal(args.goal_first_token, args.goal_between),
        rate=args.rate,
        retry=args.retry,
        max_others=args.max_others,
    )
    try:
        if not args.no_setup:
            environments.set_up({engine.family for engine in engines})
    except environments.SetupError as error:
        print(error, file=sys.stderr)
        return 1
    if args.setup_only:
        return 0
    folder = environments.peers_dir() / ("smoke" if args.smoke else "sitting")
    with folder.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another driver is at work in {folder}; let it end first", file=sys.stderr)
            return 1
        if args.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        sitting = Sitting(folder, options, environments.model_folder())
        try:
            records = sitting.run()
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
    # The page shows all that was measured, also by earlier calls for other workloads or engines.
    workloads = list(sizes.values())
    known = sitting.known(workloads, list(ENGINES.values()))
    facts = machine.facts() | {"prompts": sitting.sources}
    report = Report(workloads, known, facts, sitting.known_rate(), options.goal)
    if args.smoke:
        print(report.markdown())
    else:
        write_between_markers(args.page, report.markdown())
        write_json(args.json, report.to_json())
        print(f"wrote {args.page} and {args.json}")
    return 0 if all(record.status == "ok" for record in records) else 2


if __name__ == "__main__":
    sys.exit(main())
