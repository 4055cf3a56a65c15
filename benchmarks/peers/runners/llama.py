"""llama.cpp: `llama-batched-bench` where all requests have the same lengths, `llama-server` for arrivals.

batched-bench computes the same work as the other engines (the prompts, then one token a step for all sequences) on
token ids of its own choosing, with neither sampling nor a scheduler: what it leaves out is in llama.cpp's favour. The
first token of an answer comes from the prompt's last logits, so n tokens take n - 1 steps.
"""

from __future__ import annotations

import http.client
import json
import queue
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.runners.arrivals import Progress
from benchmarks.peers.runners.protocol import read_spec, run_arrivals, write_result
from benchmarks.peers.workloads import Request, Spec

START_TIMEOUT_S = 60.0


def program(spec: Spec, name: str, context: int) -> list[str]:
    """The command of a llama.cpp program with the cell's model and settings; `context` in KV cells of all slots."""
    peers = Path(spec.peers_dir)
    model = peers / "models" / f"{spec.settings['weights']}.gguf"
    command = [str(peers / "llama.cpp/build/bin" / name), "--model", str(model), "--ctx-size", str(context)]
    command += ["--threads", str(spec.threads), "--threads-batch", str(spec.threads)]
    for flag, value in spec.settings["flags"].items():
        command += [flag, str(value)]
    return command


def run_batched_bench(spec: Spec) -> dict[str, Any]:
    """Seconds of prompts and answers, and of the prompts alone in latency workloads."""
    [request, num_requests] = spec.runs[0][0], len(spec.runs[0])
    prompt_tokens, steps = len(request.prompt), request.output_tokens - 1
    # A prompt whose answer is its first token has no further step; batched-bench wants one, which is not counted.
    lengths = ["-npp", ",".join([str(prompt_tokens)] * len(spec.runs)), "-ntg", str(max(1, steps))]
    context = num_requests * (prompt_tokens + max(1, steps))
    command = [*program(spec, "llama-batched-bench", context), *lengths, "-npl", str(num_requests)]
    started = time.perf_counter()
    done = subprocess.run([*command, "--output-format", "jsonl"], stdout=subprocess.PIPE, text=True, check=True)
    wall_s = time.perf_counter() - started
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"n_kv_max"')]
    if len(lines) != len(spec.runs):
        raise RuntimeError(f"llama-batched-bench made {len(lines)} of {len(spec.runs)} runs")
    for line in lines:
        if (line["pp"], line["tg"], line["pl"]) != (prompt_tokens, max(1, steps), num_requests):
            raise RuntimeError(f"llama-batched-bench ran something else: {line}")
    runs = [
        {
            "seconds": line["t_pp"] + (line["t_tg"] if steps else 0.0),
            "first_token_s": line["t_pp"] if spec.kind == "latency" else None,
        }
        for line in lines
    ]
    return {"runs": runs, "startup_s": wall_s - sum(line["t"] for line in lines)}


class Server:
    """`llama-server` with one slot a sequence, and a thread for each request that reads its stream."""

    def __init__(self, spec: Spec) -> None:
        slots = spec.max_num_seqs
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = program(spec, "llama-server", slots * spec.longest)
        command += ["--parallel", str(slots), "--port", str(self._port), "--no-cache-prompt", "--cache-ram", "0"]
        command += ["--no-context-shift", "--no-webui"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._progress: queue.Queue[Progress | Exception] = queue.Queue()
        deadline = time.perf_counter() + START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.perf_counter() > deadline:
                raise RuntimeError(f"llama-server did not start (exit code {self._process.poll()})")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def submit(self, index: int, request: Request) -> None:
        threading.Thread(target=self._read, args=(index, request), daemon=True).start()

    def _read(self, index: int, request: Request) -> None:
        body = {"prompt": request.prompt, "n_predict": request.output_tokens, "stream": True, "cache_prompt": False}
        body |= {"ignore_eos": True, "temperature": 0.0, "samplers": ["top_k"], "top_k": 1}
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port)
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"llama-server answered {response.status}: {response.read(500)!r}")
            seen = 0
            for line in response:
                if line.startswith(b"data: "):
                    at = time.perf_counter()
                    event = json.loads(line[6:])
                    # A token that ends inside a character is sent with the next one: count them, not the events.
                    new, seen = event["tokens_predicted"] - seen, event["tokens_predicted"]
                    self._progress.put(Progress(index, new, at, finished=event["stop"]))
                    if event["stop"]:
                        return
            raise RuntimeError("llama-server ended the stream of a request before its answer")
        except Exception as error:  # handed to the thread that waits for it
            self._progress.put(error)

    def advance(self, max_wait: float | None) -> list[Progress]:
        try:
            progress = self._progress.get(timeout=max_wait)
        except queue.Empty:
            return []
        if isinstance(progress, Exception):
            raise progress
        return [progress]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def main() -> None:
    spec = read_spec()
    if spec.kind != "arrivals":
        write_result(run_batched_bench(spec))
        return
    started = time.perf_counter()
    server = Server(spec)
    startup_s = time.perf_counter() - started
    try:
        result = run_arrivals(spec, server)
    finally:
        server.stop()
    write_result(result | {"startup_s": startup_s})


if __name__ == "__main__":
    main()
