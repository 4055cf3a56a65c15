from __future__ import annotations

import os
import subprocess
import sys

import pytest

import vtoken


def _modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules, sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import vtoken", "from vtoken import SamplingParams", "import vtoken.cli.main"])
def test_importing_is_cheap(statement: str) -> None:
    assert not {"torch", "transformers", "tokenizers"} & _modules_after(statement)


def test_every_public_name_is_there() -> None:
    for name in vtoken.__all__:
        assert getattr(vtoken, name) is not None
    assert set(vtoken.__all__) <= set(dir(vtoken))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        vtoken.LLMM  # noqa: B018
