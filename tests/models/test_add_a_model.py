"""docs/add-a-model.md does what it says: its blocks are run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.dense import assert_rows_stand_alone, prompt_logits
from tests.policies.distributions import install
from tests.tiny_models import VOCAB_SIZE, save_any
from vtoken.base.errors import CheckpointError
from vtoken.models.base import CausalLM
from vtoken.models.kernels import COMPILED
from vtoken.models.loader import load_model
from vtoken.models.prepare import prepare_linears
from vtoken.models.registry import BUILT_IN, GROUP, model_class, supported_architectures

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "add-a-model.md").read_text(encoding="utf-8")
FAMILY, TEST, ROW = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(PROJECT,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
[(ARCHITECTURE, CLASS)] = tomllib.loads(PROJECT)["project"]["entry-points"][GROUP].items()

MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's file, in a package that registers it as the page says."""
    points = {ARCHITECTURE: CLASS}
    install(tmp_path, monkeypatch, "vtoken-granite", points, {"granite.py": FAMILY}, group=GROUP)


@pytest.mark.usefixtures("installed")
def test_the_page_s_test_passes_with_the_page_s_class(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(compile(TEST, "add-a-model.md", "exec"), names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    test(tmp_path / "model")
    assert type(load_model(tmp_path / "model")).__name__ == CLASS.partition(":")[2]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("tied", [False, True])
def test_every_switch_of_the_page_s_class_is_that_of_transformers(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_any(
        tmp_path / "model", "Granite", **MULTIPLIERS, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True
    )
    token_ids = torch.randint(0, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(token_ids[None]).logits[0]
    model = load_model(folder, kernels=COMPILED)
    for backend in (None, "vtoken_f32"):
        if backend:
            prepare_linears(model, backend=backend)
        torch.testing.assert_close(prompt_logits(model, token_ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("installed")
def test_rows_of_the_page_s_class_are_islands(tmp_path: Path) -> None:
    assert_rows_stand_alone(load_model(save_any(tmp_path / "model", "Granite", **MULTIPLIERS)), list(range(34)))


def test_the_row_is_that_of_the_class() -> None:
    assert ROW.strip() == f'"{ARCHITECTURE}": "vtoken.models.{CLASS}",'


def test_the_members_are_those_of_the_face() -> None:
    rows = PAGE[PAGE.index("| member |") :].split("\n\n")[0].splitlines()[2:]
    shown = {re.findall(r"`(\w+)", row)[0] for row in rows}
    face = {name for name in vars(CausalLM) if not name.startswith("_")}
    whole = {"hidden_states", "dtype", "num_parameters", "num_weight_bytes"}  # which a family need not write
    assert shown - {"spec"} == face - whole


def test_every_family_of_ours_is_on_the_page_of_models() -> None:
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} >= BUILT_IN.keys()


def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, package: str = "offered") -> None:
    point = {name: f"{package}:Model"}
    install(tmp_path, monkeypatch, package, point, {f"{package}.py": source}, group=GROUP)


def test_names_of_packages_are_listed_behind_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path, monkeypatch, "AForCausalLM", "")
    assert supported_architectures() == (*BUILT_IN, "AForCausalLM")


def test_a_family_of_ours_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path, monkeypatch, "LlamaForCausalLM", "raise SystemExit")
    assert supported_architectures() == tuple(BUILT_IN)
    assert model_class("LlamaForCausalLM").__module__ == "vtoken.models.llama"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise OSError('no such thing')", "AForCausalLM of offered 1.0 cannot be loaded: OSError: no such thing"),
        ("raise SystemExit(3)", "AForCausalLM of offered 1.0 cannot be loaded: SystemExit: 3"),
        ("", "AForCausalLM of offered 1.0 cannot be loaded: AttributeError"),
        ("Model = 3", "AForCausalLM of offered 1.0 is no CausalLM: offered:Model is 3"),
        ("class Model: ...", "AForCausalLM of offered 1.0 is no CausalLM"),
    ],
)
def test_what_a_package_offers_is_checked(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, monkeypatch, "AForCausalLM", source)
    with pytest.raises(CheckpointError, match=message):
        model_class("AForCausalLM")


def test_two_packages_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path, monkeypatch, "AForCausalLM", "", "one")
    offer(tmp_path, monkeypatch, "AForCausalLM", "", "two")
    with pytest.raises(CheckpointError, match="offered more than once: one 1.0, two 1.0; remove all but one"):
        model_class("AForCausalLM")
