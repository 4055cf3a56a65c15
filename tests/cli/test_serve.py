"""`vtoken serve`: options from three places, what is refused at start, and how it ends."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from tests.cli.conftest import Ran
from tests.server.serving import until
from tests.tiny_models import BOS, EOS, save_llama
from vtoken import EngineError
from vtoken.cli import serve
from vtoken.server.settings import ServerSettings

Vtoken = Callable[..., Ran]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, its key, the same key with a password, the key of another; who has signed it."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    issued, other = authority.issue_cert("127.0.0.1"), authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "authority.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "certificate.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    other.private_key_pem.write_to_path(folder / "other_key.pem")
    (folder / "words.txt").write_text("no certificate\n")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    locked = serialization.BestAvailableEncryption(b"sesame")
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "locked_key.pem").write_bytes(key.private_bytes(*form, locked))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(
        tmp_path_factory.mktemp("m") / "tiny",
        tokenizer=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        max_position_embeddings=8192,
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What engines would be started with; none is."""
    seen: list[dict[str, Any]] = []

    def no_engine(**settings: Any) -> None:
        seen.append(settings)
        raise EngineError("none in this test")

    monkeypatch.setattr("vtoken.engine.async_llm.AsyncLLM", no_engine)
    return seen


def start(vtoken: Vtoken, *arguments: str) -> None:
    ran = vtoken("serve", *arguments)
    assert (ran.code, ran.err.splitlines()[-1]) == (1, "error: none in this test")


def test_options_from_three_places(vtoken, folder, started, tmp_path, monkeypatch):
    """The command line counts most, then the environment, then the file."""
    file = tmp_path / "vtoken.yaml"
    file.write_text(
        f"model: {folder}\nport: 0\nmax-num-seqs: 3\nblock_size: 8\nseed: 5\nenable-prefix-caching: false\n"
        "num-gpu-blocks-override: 40\napi-key: [a, b]\nmax-model-len: auto\n"
    )
    monkeypatch.setenv("VTOKEN_MAX_NUM_SEQS", "4")
    monkeypatch.setenv("VTOKEN_BLOCK_SIZE", "32")
    monkeypatch.setenv("VTOKEN_CONFIG", str(file))
    start(vtoken, "--block-size", "64")
    [engine] = started
    assert engine["model"] == str(folder)
    assert (engine["block_size"], engine["max_num_seqs"], engine["seed"]) == (64, 4, 5)
    assert (engine["num_blocks"], engine["max_model_len"], engine["enable_prefix_caching"]) == (40, "auto", False)


def test_the_names_of_vllm(vtoken, folder, started):
    sizes = ("--kv-cache-memory-bytes", "1MiB", "--preemption-mode", "swap", "--swap-space", "2MiB")
    limits = ("--max-queued-requests", "all", "--uvicorn-log-level", "error", "--max-num-batched-tokens", "512")
    start(vtoken, str(folder), "--port", "0", *sizes, *limits)
    [engine] = started
    assert (engine["kv_memory"], engine["preemption"], engine["swap_space"]) == (2**20, "swap", 2**21)
    assert engine["max_queued_requests"] is None


def test_every_setting_has_an_option(vtoken, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = vtoken("serve", "--help").out
    for name in ServerSettings.names():
        assert f"--{name.replace('_', '-')}" in out
    assert "…" not in out
    assert max(map(len, out.splitlines()[1:])) <= 80


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "model: missing; name it behind `vtoken serve`"),
        (["MODEL", "--port", "99999"], "--port: expected a whole number from 0 to 65535, got 99999"),
        (["MODEL", "--api-key", ""], "--api-key: expected a text that is not empty"),
        (["MODEL", "--root-path", "llm/"], "--root-path: expected '' or a path that starts with /"),
        (["MODEL", "--ssl-keyfile", "x"], "--ssl-keyfile: has no effect without --ssl-certfile"),
        (
            ["MODEL", "--swap-space", "4", "--preemption", "swap"],
            "--swap-space 4 is that many bytes; write 4GiB for GiB",
        ),
        (["MODEL", "--gpu-memory-utilization", "0.9"], "the KV pool has a size, not a share: set --kv-memory 2GiB"),
        (["MODEL", "--host", "nowhere.invalid"], "there is no such address"),
        (["/nowhere"], "/nowhere"),
        (["MODEL", "--config", "/nowhere.yaml"], "the config file '/nowhere.yaml' cannot be read"),
        (["MODEL", "--chat-template", "/nowhere"], "--chat-template: the file '/nowhere' cannot be read"),
    ],
)
def test_what_cannot_be_is_one_line(vtoken, folder, line, said):
    line = [str(folder) if word == "MODEL" else word for word in line]
    ran = vtoken("serve", *line, *(("--port", "0") if "--port" not in line else ()), "--num-blocks", "64")
    assert ran.code == 2
    [error] = [each for each in ran.err.splitlines() if each.startswith("error: ")]
    assert said in error
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1", "unknown option 'prot'; did you mean 'port'?"),
        ("port: [1", "is no YAML at line"),
        ("- port", "expected lines such as 'port: 8000'"),
        ("port: {a: 1}", "port: expected a value, or a list of values"),
        ("port: many", "expected a whole number, got 'many'"),
        ("config: x", "unknown option 'config'"),
        ("port: 1\n# as we said\nport: 2", "'port' at line 3 was set at line 1 already; leave one of them out"),
        ("num-blocks: 8\nnum_blocks: 8", "num-blocks' at line 2 was set at line 1 already"),
        ("num-blocks: 8\nnum-gpu-blocks-override: 9", "'num-gpu-blocks-override' at line 2 was set at line 1 already"),
        ("{port: 1, seed: 2, port:}", "'port' at line 1 was set at line 1 already"),
        ("port: &port [*port]", "port: expected a value, or a list of values"),
        ("api-key: []", "api-key: is empty, expected one key or more; leave the line out to serve anybody"),
        ("api_key:", "--api-key: is empty"),
        ("api-key: ''", "api-key: is empty"),
        ("api-key: ['']", "--api-key: expected a text that is not empty"),
    ],
)
def test_a_config_file_that_is_wrong(vtoken, tmp_path, text, said):
    file = tmp_path / "x.yaml"
    file.write_text(text)
    ran = vtoken("serve", "m", "--config", str(file))
    assert ran.code == 2
    assert said in ran.err


@pytest.mark.parametrize("key", ["", " \n"])
def test_an_empty_key_in_the_environment(vtoken, folder, started, monkeypatch, key):
    """A secret that failed to expand opens no server."""
    monkeypatch.setenv("VTOKEN_API_KEY", key)
    ran = vtoken("serve", str(folder), "--port", "0")
    assert ran.code == 2
    assert ran.err.startswith("error: the environment variable VTOKEN_API_KEY: is empty, expected one key or more")
    assert ran.err.count("\n") == 1
    assert not started


def test_a_port_in_use_is_heard_of_before_the_model_is_loaded(vtoken, folder, started):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ran = vtoken("serve", str(folder), "--port", str(other.getsockname()[1]))
    assert ran.code == 2
    assert "the port is in use" in ran.err
    assert not started


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        ("nowhere.pem", None, "--ssl-certfile: the file 'nowhere.pem' cannot be read: No such file or directory"),
        (".", None, "--ssl-certfile: the file '.' cannot be read: Is a directory"),
        ("words.txt", "key.pem", "--ssl-certfile: there is no certificate in PEM form in 'words.txt'"),
        ("key.pem", "key.pem", "--ssl-certfile: there is no certificate in PEM form in 'key.pem'"),
        (
            "certificate.pem",
            None,
            "--ssl-certfile: 'certificate.pem' holds no private key in PEM form that can be used",
        ),
        ("certificate.pem", "nowhere.pem", "--ssl-keyfile: the file 'nowhere.pem' cannot be read: No such file"),
        (
            "certificate.pem",
            "words.txt",
            "--ssl-keyfile: 'words.txt' holds no private key in PEM form that can be used",
        ),
        ("certificate.pem", "certificate.pem", "--ssl-keyfile: 'certificate.pem' holds no private key in PEM form"),
        (
            "certificate.pem",
            "other_key.pem",
            "--ssl-keyfile: 'other_key.pem' holds a private key of another certificate",
        ),
        ("certificate.pem", "locked_key.pem", "--ssl-keyfile: 'locked_key.pem' holds a key with a password"),
    ],
)
def test_a_certificate_that_cannot_be_used(vtoken, folder, started, monkeypatch, tls, certificate, key, said):
    """Heard of before the model is loaded, in one line."""
    monkeypatch.chdir(tls)
    options = ["--ssl-certfile", certificate, *(() if key is None else ("--ssl-keyfile", key))]
    ran = vtoken("serve", str(folder), "--port", "0", *options)
    assert ran.code == 2
    assert ran.err.startswith(f"error: {said}")
    assert ran.err.count("\n") == 1
    assert not started


def test_https(folder, tls, tmp_path):
    """With the key in a file of its own, or in that of the certificate, which is what --ssl-certfile alone means."""
    both = tmp_path / "both.pem"
    both.write_text((tls / "certificate.pem").read_text() + (tls / "key.pem").read_text())
    for options in (
        ["--ssl-certfile", f"{tls}/certificate.pem", "--ssl-keyfile", f"{tls}/key.pem"],
        ["--ssl-certfile", str(both)],
    ):
        with process(folder, "--num-blocks", "1024", *options) as (_, url, _):
            assert url.startswith("https://")
            trusted = ssl.create_default_context(cafile=str(tls / "authority.pem"))
            assert httpx.get(f"{url}/health", verify=trusted).status_code == 200


def test_a_variable_that_means_nothing_is_told(vtoken, folder, started, monkeypatch, caplog):
    monkeypatch.setenv("VTOKEN_PRT", "1")
    monkeypatch.setenv("VTOKEN_CACHE", str(folder))
    start(vtoken, str(folder), "--port", "0")
    assert "VTOKEN_PRT means nothing; did you mean 'VTOKEN_PORT'?" in caplog.text
    assert "VTOKEN_CACHE" not in caplog.text


def test_a_model_is_named_by_the_last_part_of_its_path(folder):
    assert serve._name_of(str(folder)) == "tiny"
    assert serve._name_of(f"{folder}/") == "tiny"
    assert serve._name_of("smollm2-135m") == "smollm2-135m"


# --- a process of its own ---------------------------------------------------------------------------------------------


@contextmanager
def process(
    folder: Path, *options: str, max_files: tuple[int, int] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server, its address, and the lines it has said at start. `max_files`: its soft and hard limit of open files."""
    command = [sys.executable, "-c", "from vtoken.cli.main import run; run()", "serve", str(folder), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment)
    if max_files is not None:  # long before it looks at them: torch takes seconds to import
        resource.prlimit(started.pid, resource.RLIMIT_NOFILE, max_files)
    lines = []
    try:
        assert started.stderr is not None
        for line in started.stderr:
            lines.append(line)
            if "(Ctrl-C ends it)" in line:  # told once it listens
                break
        found = re.search(r"at (https?://\S+)/v1", "".join(lines))
        assert found, lines
        yield started, found[1], lines
    finally:
        started.kill()
        started.wait()


@pytest.mark.parametrize("level", ["info", "debug"])
def test_what_is_said_at_start(folder, level):
    """Weights and pool once, in the summary; which kernel each layer got is for those who look for faults."""
    with process(folder, "--num-blocks", "1024", "--log-level", level) as (_, _, lines):
        said = "".join(lines)
    assert ("linear 64 -> " in said) == (level == "debug")
    if level == "info":
        assert said.count("weights") == said.count("KV pool") == 1


@contextmanager
def streams(url: str, count: int, max_tokens: int) -> Iterator[list[Future[str]]]:
    """Answers that are being streamed."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(count) as pool:
        running = [pool.submit(lambda: client.post("/v1/completions", json=body).text) for _ in range(count)]
        until(lambda: client.get("/load").json()["server_load"] == count)
        yield running


def test_a_gentle_end(folder):
    """U76: what runs ends as asked, and the exit code is 0; the summary was told at start."""
    with process(folder, "--num-blocks", "1024") as (server, url, lines):
        said = "".join(lines)
        assert "KV pool: 8 MiB, 1,024 blocks of 16 tokens: 16,384 tokens, 512 B each" in said
        assert "64 of 256, or 16 of 1,024, or 4 of 4,096, or 2 of 8,192" in said
        with streams(url, 3, max_tokens=1000) as running:
            server.send_signal(signal.SIGTERM)
            for answer in running:
                assert '"finish_reason":"length"' in answer.result()
                assert answer.result().endswith("data: [DONE]\n\n")
        assert server.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


@pytest.mark.parametrize(
    "again",
    [pytest.param(False, id="time is over"), pytest.param(True, id="a second signal", marks=pytest.mark.slow)],
)
def test_an_end_that_does_not_wait(folder, again):
    """U76: streams end with an error event, and the port is free at once."""
    with process(folder, "--num-blocks", "2048", "--drain-timeout", "60" if again else "0.1") as (server, url, _):
        with streams(url, 4, max_tokens=8000) as running:
            server.send_signal(signal.SIGTERM)
            if again:
                until(lambda: httpx.get(f"{url}/health").status_code == 503)
                server.send_signal(signal.SIGINT)
            for answer in running:
                *_, last = answer.result().split("\n\n")[:-1]
                assert last.startswith('data: {"error": {"message": "the server')
        assert server.wait(20) == 0
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", int(url.rpartition(":")[2])))


def test_bodies_that_are_still_to_come_hold_up_no_end(folder):
    """They are told so at once; nobody lingers on for what is larger than the limit either."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    with process(folder, "--num-blocks", "1024", "--drain-timeout", "60") as (server, url, _):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(address, 20) as half, socket.create_connection(address, 20) as large:
            half.sendall(f"{head}100\r\n\r\n{{".encode())
            large.sendall(f"{head}100000000\r\n\r\n{{".encode())
            assert large.recv(1000).startswith(b"HTTP/1.1 413")
            until(lambda: httpx.get(f"{url}/load").json()["server_load"] == 1)
            server.send_signal(signal.SIGTERM)
            with HTTPResponse(half) as answer:
                answer.begin()
                assert answer.status == 503
                assert json.loads(answer.read())["error"]["code"] == "unavailable"
            assert server.wait(4) == 0  # well before the seconds that uvicorn gives
        assert "Traceback" not in server.stderr.read()


def test_more_connections_than_the_soft_limit(folder):
    """Those who connect and are silent keep nobody out."""
    with process(folder, "--num-blocks", "1024", max_files=(128, 512)) as (_, url, _), ExitStack() as held:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for _ in range(200):
            held.enter_context(socket.create_connection(address))
        assert httpx.get(f"{url}/health").status_code == 200


def test_more_connections_than_the_hard_limit(folder):
    """One line says so, and not thousands with a traceback each."""
    with process(folder, "--num-blocks", "1024", max_files=(128, 128)) as (server, url, _):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with ExitStack() as held:
            for _ in range(160):
                held.enter_context(socket.create_connection(address))
            assert "no connection can be accepted: Too many open files" in server.stderr.readline()
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200  # a second later it is tried again
        server.send_signal(signal.SIGTERM)
        assert "no connection" not in server.stderr.read()
