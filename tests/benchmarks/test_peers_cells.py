"""A cell is a process: its environment, its end, what it printed, and llama.cpp's programs behind their runner."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import cell, environments
from benchmarks.peers.cell import environment_of, failure_reason, find_result, run_cell
from benchmarks.peers.engines import ENGINES, TARGETS, Engine
from benchmarks.peers.environments import SetupError, Step, set_up
from benchmarks.peers.machine import cpu_info
from benchmarks.peers.runners.arrivals import drive
from benchmarks.peers.runners.llama import Server, run_batched_bench
from benchmarks.peers.workloads import SMOKE, WORKLOADS, Request, Spec

ENGINE = Engine("e", "transformers", "float32", env={"OMP_NUM_THREADS": "{threads}", "LIBRARY": "{peers}/lib"})
SPEC = Spec("batch", [[Request([1, 2], 3)]], Request([1], 1), "model", {}, "peers", 2, 4, 100)


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test puts the program that stands in for an engine's Python."""
    path = tmp_path / "python"
    monkeypatch.setattr(environments, "python_of", lambda family: path)
    return path


def test_the_last_result_line_counts() -> None:
    assert find_result('loading\nPEERS-RESULT {}\nnoise\nPEERS-RESULT {"seconds": 1.5}\nbye\n') == {"seconds": 1.5}
    assert find_result("nothing") is None


def test_a_reason_is_one_line() -> None:
    assert failure_reason("Traceback\n  x\nValueError: bad\n\n", 1) == "ValueError: bad (exit code 1)"
    assert failure_reason("", -9) == "no message (exit code -9)"


def test_the_callers_threading_does_not_reach_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell, "num_threads", lambda: 2)
    monkeypatch.setenv("VTOKEN_PEERS_DIR", "/peers")
    base = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    assert environment_of(ENGINE, base) == {"PATH": "/bin", "OMP_NUM_THREADS": "2", "LIBRARY": "/peers/lib"}


def test_a_cell_hands_back_what_its_runner_printed(tmp_path: Path, interpreter: Path) -> None:
    program(interpreter, '#!/bin/sh\necho "PEERS-RESULT {\\"args\\": \\"$1 $2\\"}"\necho warning >&2\n')
    outcome = run_cell(ENGINE, SPEC, tmp_path / "cell", 30)
    assert outcome.result == {"args": "-m benchmarks.peers.runners.transformers"}
    assert not outcome.timed_out
    assert Spec.from_json(json.loads((tmp_path / "cell" / "spec.json").read_text())) == SPEC


def test_a_cell_that_dies_says_why(tmp_path: Path, interpreter: Path) -> None:
    program(interpreter, "#!/bin/sh\necho 'RuntimeError: no memory' >&2\nexit 3\n")
    outcome = run_cell(ENGINE, SPEC, tmp_path / "cell", 30)
    assert (outcome.result, outcome.reason) == (None, "RuntimeError: no memory (exit code 3)")


def test_over_the_limit_a_cell_ends_with_all_it_started(tmp_path: Path, interpreter: Path) -> None:
    program(interpreter, f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/child\nwait\n")
    outcome = run_cell(ENGINE, SPEC, tmp_path / "cell", 0.5)
    assert outcome.timed_out
    assert outcome.reason == "over the limit of 0.5 s"
    child = int((tmp_path / "child").read_text())
    _wait_until(lambda: not _is_running(child))


DRIVER = """
import sys
from pathlib import Path
from benchmarks.peers import cell, environments
from benchmarks.peers.engines import Engine
from benchmarks.peers.workloads import Request, Spec
environments.python_of = lambda family: Path(sys.argv[1])
cell.end_on_sigterm()
spec = Spec("batch", [[Request([1], 1)]], Request([1], 1), "model", {}, "peers", 2, 4, 100)
cell.run_cell(Engine("e", "transformers", "float32"), spec, Path(sys.argv[2]), 60)
"""


def test_a_driver_that_is_told_to_end_ends_its_cell(tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    interpreter = program(
        tmp_path / "python", f"#!/bin/sh\necho $$ > {child_file}.new\nmv {child_file}.new {child_file}\nsleep 1000\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(interpreter), str(tmp_path / "cell")], cwd=cell.ROOT)
    try:
        _wait_until(child_file.exists)
        driver.terminate()
        assert driver.wait(30) == 128 + signal.SIGTERM
        _wait_until(lambda: not _is_running(int(child_file.read_text())))
    finally:
        driver.kill()


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    """Not so for a zombie, which whoever adopted it will collect."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def llama_spec(kind: str, runs: list[list[Request]], peers: Path) -> Spec:
    settings = {"weights": "f32", "flags": {"--flash-attn": "on"}}
    return replace(SPEC, kind=kind, runs=runs, settings=settings, peers_dir=str(peers))  # type: ignore[arg-type]


BENCH = """#!{python}
import json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
open({log!r}, "w").write(json.dumps(flags))
for pp in map(int, flags["-npp"].split(",")):
    print("log line")
    line = dict(n_kv_max=1, pp=pp, tg=int(flags["-ntg"]), pl=int(flags["-npl"]), t_pp=0.5, t_tg=2.0, t=2.5)
    print(json.dumps(line))
"""


@pytest.mark.parametrize(
    ("kind", "output_tokens", "seconds", "first"),
    [("batch", 3, 2.5, None), ("latency", 3, 2.5, 0.5), ("prefill", 1, 0.5, None)],
)
def test_batched_bench_does_the_work_of_the_others(
    tmp_path: Path, kind: str, output_tokens: int, seconds: float, first: float | None
) -> None:
    log = tmp_path / "flags"
    path = tmp_path / "llama.cpp/build/bin/llama-batched-bench"
    program(path, BENCH.format(python=sys.executable, log=str(log)))
    runs = [[Request([1] * 8, output_tokens), Request([2] * 8, output_tokens)]] * 2
    result = run_batched_bench(llama_spec(kind, runs, tmp_path))
    assert result["runs"] == [{"seconds": seconds, "first_token_s": first}] * 2
    flags = json.loads(log.read_text())
    steps = max(1, output_tokens - 1)  # the first token comes from the prompt
    assert flags["-ntg"] == str(steps)
    assert flags["-npp"] == "8,8"
    assert int(flags["--ctx-size"]) == 2 * (8 + steps)
    assert flags["--model"] == f"{tmp_path}/models/f32.gguf"
    assert flags["--threads"] == flags["--threads-batch"] == "2"


SERVER = """#!{python}
import http.server, json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200 if body["n_predict"] < 9 else 400)
        self.end_headers()
        # Every third token ends inside a character: it is told of with the next one.
        for i in range(1, body["n_predict"] + 1):
            if i % 3:
                self.event(i, False)
        self.event(body["n_predict"], True)

    def event(self, tokens, stop):
        self.wfile.write(b"data: " + json.dumps(dict(tokens_predicted=tokens, stop=stop)).encode() + b"\\n\\n")

    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


def test_the_server_runner_counts_every_token_of_a_stream(tmp_path: Path) -> None:
    program(tmp_path / "llama.cpp/build/bin/llama-server", SERVER.format(python=sys.executable))
    requests = [Request([1], 3), Request([2], 4), Request([3], 1)]
    server = Server(llama_spec("arrivals", [requests], tmp_path))
    try:
        assert [len(times) for times in drive(requests, server)] == [3, 4, 1]
        with pytest.raises(RuntimeError, match="llama-server answered 400"):
            drive([Request([1], 9)], server)
    finally:
        server.stop()


def test_a_server_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    program(tmp_path / "llama.cpp/build/bin/llama-server", "#!/bin/sh\nexit 7\n")
    with pytest.raises(RuntimeError, match=r"did not start \(exit code 7\)"):
        Server(llama_spec("arrivals", [[Request([1], 1)]], tmp_path))


def test_a_step_of_the_set_up_is_done_once_for_each_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTOKEN_PEERS_DIR", str(tmp_path / "peers"))
    done: list[str] = []
    broken = True

    def second(log: Path) -> None:
        if broken:
            environments._command([sys.executable, "-c", "print('first'); print('disk full'); exit(4)"], log)
        done.append("two")

    def steps(recipe: str = "v1") -> list[Step]:
        return [
            Step("one", recipe, frozenset({"vllm"}), lambda log: done.append("one")),
            Step("two", "v1", frozenset({"vllm"}), second),
            Step("other", "v1", frozenset({"llama.cpp"}), lambda log: done.append("other")),
        ]

    monkeypatch.setattr(environments, "steps", steps)
    with pytest.raises(SetupError, match="ended with code 4: disk full"):
        set_up({"vllm"}, progress=lambda line: None)
    assert done == ["one"]
    broken = False
    set_up({"vllm"}, progress=lambda line: None)
    set_up({"vllm"}, progress=lambda line: None)
    assert done == ["one", "two"]
    monkeypatch.setattr(environments, "steps", lambda: steps("v2"))
    set_up({"vllm"}, progress=lambda line: None)
    assert done == ["one", "two", "one"]


def test_every_step_serves_an_engine_and_every_engine_has_a_place() -> None:
    families = {engine.family for engine in ENGINES.values()}
    assert all(step.families and step.families <= families for step in environments.steps())
    assert {name for target in TARGETS for name in (target.ours, *target.peers)} <= set(ENGINES)
    assert {target.workload for target in TARGETS} <= set(WORKLOADS)
    assert not any(ENGINES[name].information for target in TARGETS for name in (target.ours, *target.peers))
    assert {name: each.kind for name, each in SMOKE.items()} == {name: each.kind for name, each in WORKLOADS.items()}
    for engine in ENGINES.values():
        module = f"runners/{engine.family.replace('.cpp', '')}.py"
        assert (Path(cell.__file__).parent / module).is_file()


def test_the_cpu_is_named_with_what_matters() -> None:
    lines = ["vendor_id\t: AuthenticAMD", "cpu family\t: 25", "model\t\t: 17", "model name\t: AMD EPYC"]
    text = "\n".join([*lines, "flags\t\t: fpu avx2 avx512f x"])
    assert cpu_info(text) == ("AuthenticAMD", "AMD EPYC, family 25 model 17", ["avx2", "avx512f"])
