"""What is compared with what, and what is refused before a model is looked at."""

from __future__ import annotations

from typing import Any

import pytest

from vtoken.base.errors import ConfigError, RequestError
from vtoken.evals.setting import engine_settings, make_grid
from vtoken.policies.h2o import H2O


def test_every_policy_meets_every_budget_in_every_format() -> None:
    grid = make_grid(["h2o", "random"], [64, 0.5], ["auto", "int8"])
    assert [str(setting) for setting in grid.settings] == [
        *("full cache", "h2o 64", "h2o 0.5", "random 64", "random 0.5"),
        *("full cache, int8", "h2o 64, int8", "h2o 0.5, int8", "random 64, int8", "random 0.5, int8"),
    ]
    assert grid.formats == ["auto", "int8"]
    assert len(grid.of_format("int8")) == 5
    assert grid.settings[0].params == {}
    assert grid.settings[1].params == {
        "kv_policy": H2O(),
        "kv_budget": 64,
        "kv_trigger": "always",
        "kv_stride": None,
        "kv_prefill_stride": None,
    }


def test_nothing_is_run_twice() -> None:
    assert len(make_grid(["h2o", "h2o"], [64, 64], ["auto", "auto"]).settings) == 2


def test_the_full_cache_may_be_alone() -> None:
    assert [str(setting) for setting in make_grid([], [], ["auto"]).settings] == ["full cache"]


def test_a_least_stride_in_the_prompt_gives_way_to_a_longer_window() -> None:
    grid = make_grid(["h2o", "snapkv:window=80"], [128], ["auto"], least_prefill_stride=64)
    assert [setting.prefill_stride for setting in grid.settings] == [None, 64, 80]
    told = make_grid(["h2o"], [128], ["auto"], prefill_stride=0, least_prefill_stride=64)
    assert told.settings[1].prefill_stride == 0


@pytest.mark.parametrize(
    ("policies", "budgets", "formats", "message"),
    [
        (["h3o"], [64], ["auto"], "unknown kv_policy 'h3o'"),
        (["h2o"], [], ["auto"], "budget: expected at least one"),
        ([], [64], ["auto"], "policy: expected at least one"),
        (["h2o"], [64], ["int9"], "kv_cache_dtype: unknown format 'int9'; did you mean 'int8'"),
    ],
)
def test_what_does_not_exist_is_refused(policies: Any, budgets: Any, formats: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_grid(policies, budgets, formats)


@pytest.mark.parametrize("budget", [0, 1.5, -3])
def test_budgets_are_those_of_requests(budget: float) -> None:
    with pytest.raises(RequestError, match="kv_budget: expected a whole number of tokens from 1 up, or a share"):
        make_grid(["h2o"], [budget], ["auto"])


def test_blocks_are_not_shared_unless_asked_for() -> None:
    assert engine_settings("int8", {}) == {
        "enable_prefix_caching": False,
        "max_model_len": "auto",
        "kv_cache_dtype": "int8",
    }
    assert engine_settings("auto", {"enable_prefix_caching": True})["enable_prefix_caching"]
    with pytest.raises(ConfigError, match="block_size"):
        engine_settings("auto", {"block_size": 3})
