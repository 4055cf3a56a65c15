"""Mistakes are told before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vtoken.base.config import EngineConfig
from vtoken.base.errors import VtokenError
from vtoken.engine.precheck import precheck


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_policy": "h20", "kv_budget": 64}, "did you mean 'h2o'"),
        ({"kv_policy": "h2o"}, "kv_budget, in tokens"),
        ({"kv_budget": 64}, "kv_policy"),
        ({"kv_policy": "streaming_llm", "kv_budget": 3}, "too small"),
        ({"model": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_what_it_tells(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(VtokenError, match=message):
        precheck(EngineConfig(**{"model": str(tmp_path), **settings}))


def test_what_may_work_passes(tmp_path: Path) -> None:
    precheck(EngineConfig(model=str(tmp_path), kv_policy="h2o:recent=8", kv_budget=0.5))


def test_it_needs_no_torch() -> None:
    code = "import sys; import vtoken.engine.precheck; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
