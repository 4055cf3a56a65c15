"""What a model's name may mean (behaviour U91: one line saying what was expected, found, and to do; no network)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vtoken.base.errors import CheckpointError
from vtoken.models.resolve import resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(tmp_path) == resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~") == tmp_path


def test_a_folder_named_like_a_model_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    assert resolve_model("smollm2-135m") == Path("smollm2-135m")


def test_a_catalogue_name_is_its_folder_once_fetched(cache: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"'smollm2-135m' is not here yet; get it with: vtoken models get smollm2"
    ):
        resolve_model("smollm2-135m")
    folder = cache / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    assert resolve_model("smollm2-135m") == folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("meta-llama/Llama-3.1-8B", r"looks like a Hugging Face hub name; .*vtoken models get smollm2-135m"),
        ("./models/llama", r"does not exist; expected a checkpoint folder, a \.gguf file or one of .*smollm2-135m"),
        ("/nowhere/llama.gguf", "does not exist; expected"),
        ("llama", "does not exist; expected"),
        ("SmolLM-135M", "does not exist; did you mean 'smollm2-135m'\\? expected"),
        ("", "the model's name is empty; expected a checkpoint folder"),
        (
            "~nosuchuser/llama",
            r"'~nosuchuser/llama' cannot be looked up \(Could not determine home.*\); expected a check",
        ),
        ("x" * 300, r"^'x{50,}… cannot be looked up \(File name too long\); expected a checkpoint"),
        ("a/" * 3000, r"cannot be looked up \(File name too long\); expected a checkpoint"),
        ("a\0b", "does not exist; expected"),
    ],
)
def test_names_that_mean_nothing(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_model(name)


@pytest.mark.parametrize(
    ("folder", "reason"), [("~nosuchuser/cache", "Could not determine home"), ("/" + "x" * 300, "File name too long")]
)
def test_an_impossible_cache_is_named(folder: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTOKEN_CACHE", folder)
    with pytest.raises(CheckpointError, match=rf"no cache in {folder} \({reason}.*\); set VTOKEN_CACHE to another"):
        resolve_model("smollm2-135m")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"is a file; expected a checkpoint folder or a \.gguf file"):
        resolve_model(tmp_path / "model.safetensors")


def test_planning_a_model_imports_no_torch() -> None:
    code = "import sys, vtoken.models.resolve, vtoken.models.config; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )
