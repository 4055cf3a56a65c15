"""One cell: an engine, a workload, a process of its own with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import psutil

from benchmarks.peers import environments
from benchmarks.peers.engines import Engine
from benchmarks.peers.machine import num_threads
from benchmarks.peers.runners.protocol import MARK
from benchmarks.peers.workloads import Spec

ROOT: Final = Path(__file__).resolve().parents[2]
# Settings of the caller's shell that would change how many threads an engine takes, or where they run.
_THREADING: Final = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "VLLM_", "LD_PRELOAD", "TORCH_", "GGML_")


@dataclass(frozen=True)
class Outcome:
    """`result` is the runner's own; None with a `reason` where there is none.

    `others_share`: CPU time that other processes took while the cell ran, of all the machine's: what disturbed it.
    """

    result: dict[str, Any] | None
    reason: str | None
    timed_out: bool
    wall_s: float
    others_share: float


def run_cell(engine: Engine, spec: Spec, folder: Path, timeout_s: float) -> Outcome:
    """Run one cell; everything it started is ended when this returns or raises. Leaves spec.json, stdout, stderr."""
    folder.mkdir(parents=True, exist_ok=True)
    spec_path = folder / "spec.json"
    spec_path.write_text(json.dumps(spec.to_json()))
    module = f"benchmarks.peers.runners.{engine.family.replace('.cpp', '')}"
    command = [str(environments.python_of(engine.family)), "-m", module, str(spec_path)]
    started, cpu_before = time.perf_counter(), _cpu_seconds()
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        env = environment_of(engine, os.environ)
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err, start_new_session=True)
        timed_out = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end_group(process)
    wall_s, cpu_after = time.perf_counter() - started, _cpu_seconds()
    machine, own = cpu_after[0] - cpu_before[0], cpu_after[1] - cpu_before[1]
    others_share = max(0.0, machine - own) / ((os.cpu_count() or 1) * wall_s)
    if timed_out:
        return Outcome(None, f"over the limit of {timeout_s:g} s", True, wall_s, others_share)
    result = find_result((folder / "stdout").read_text(errors="replace"))
    reason = None
    if result is None:
        reason = failure_reason((folder / "stderr").read_text(errors="replace"), process.returncode)
    return Outcome(result, reason, False, wall_s, others_share)


def environment_of(engine: Engine, base: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without threading settings, and the engine's own."""
    env = {name: value for name, value in base.items() if not name.startswith(_THREADING)}
    filled = {"threads": num_threads(), "peers": environments.peers_dir()}
    return env | {name: value.format(**filled) for name, value in engine.env.items()}


def find_result(stdout: str) -> dict[str, Any] | None:
    """The result that a runner printed, if it got so far."""
    lines = [line for line in stdout.splitlines() if line.startswith(MARK)]
    return None if not lines else dict(json.loads(lines[-1].removeprefix(MARK)))


def failure_reason(stderr: str, code: int) -> str:
    """One line: the last thing that was said, or how the process ended."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return f"{lines[-1] if lines else 'no message'} (exit code {code})"


def _cpu_seconds() -> tuple[float, float]:
    """CPU seconds so far: (of the whole machine, of this process's ended children)."""
    times = psutil.cpu_times()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return times.user + times.nice + times.system, children.ru_utime + children.ru_stime


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process's session: the process itself, servers and workers it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_on_sigterm() -> None:
    """Let SIGTERM end the driver as Ctrl-C does, so that no cell is left running; `timeout` and job systems send it."""

    def stop(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, stop)
