from __future__ import annotations

import os
import subprocess
import sys

import pytest

import vtoken


def _run(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("statement", ["import vtoken", "from vtoken import SamplingParams", "import vtoken.cli.main"])
def test_importing_is_cheap(statement: str) -> None:
    loaded = _run(f"import sys; {statement}; print(*sys.modules)").split()
    assert "vtoken" in loaded
    assert not {"torch", "transformers", "tokenizers"} & set(loaded)


def test_torchs_threads_sleep_while_they_wait_unless_the_user_chose() -> None:
    code = "import sys, os, vtoken.engine; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    assert _run(code, OMP_WAIT_POLICY="ACTIVE").split() == ["ACTIVE", "False"]
    unset = f"import os; os.environ.pop('OMP_WAIT_POLICY', None); {code}"
    assert _run(unset).split() == ["PASSIVE", "False"]


def test_every_public_name_is_there() -> None:
    for name in vtoken.__all__:
        assert getattr(vtoken, name) is not None
    assert set(vtoken.__all__) <= set(dir(vtoken))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        vtoken.LLMM  # noqa: B018
