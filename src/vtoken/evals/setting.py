"""`Setting`: what stays of a text and in which format it is kept. One line of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from vtoken.base.config import EngineConfig
from vtoken.base.errors import ConfigError
from vtoken.base.kv_format import KV_FORMATS
from vtoken.base.registry import suggest
from vtoken.base.sampling_params import SamplingParams
from vtoken.policies.base import Policy
from vtoken.policies.registry import resolve_policy

FULL: Final = "full cache"


@dataclass(frozen=True)
class Setting:
    """A policy and a budget, or the full cache, in a KV format."""

    name: str  # the policy as the user wrote it
    policy: Policy | None  # None: every token is kept
    budget: int | float | None
    kv_format: str  # a name of `kv_cache_dtype`
    stride: int | None = None  # None: the policy's own
    prefill_stride: int | None = None

    def __str__(self) -> str:
        kept = FULL if self.policy is None else f"{self.name} {self.budget}"
        return kept if self.kv_format == "auto" else f"{kept}, {self.kv_format}"

    @property
    def is_full(self) -> bool:
        return self.policy is None

    @property
    def params(self) -> dict[str, Any]:
        """Fields of `SamplingParams`."""
        if self.policy is None:
            return {}
        return {
            "kv_policy": self.policy,
            "kv_budget": self.budget,
            "kv_trigger": "always",  # so that nothing but the text decides what dies
            "kv_stride": self.stride,
            "kv_prefill_stride": self.prefill_stride,
        }


@dataclass(frozen=True)
class Grid:
    """All that is to be compared, checked as far as it can be without texts."""

    settings: tuple[Setting, ...]  # by format; of each the full cache first

    @property
    def formats(self) -> list[str]:
        return list(dict.fromkeys(setting.kv_format for setting in self.settings))

    def of_format(self, name: str) -> list[Setting]:
        return [setting for setting in self.settings if setting.kv_format == name]


def make_grid(
    policies: Sequence[str],
    budgets: Sequence[int | float],
    formats: Sequence[str],
    *,
    stride: int | None = None,
    prefill_stride: int | None = None,
    least_prefill_stride: int | None = None,
) -> Grid:
    """Every policy with every budget in every format, and the full cache in each of them.

    `prefill_stride` is for all policies; without it each has its own, or with `least_prefill_stride` that one, or as
    much more as the policy needs for its window.

    Raises ConfigError for what does not exist, what contradicts itself, and policies without a budget or the reverse.
    """
    if bool(policies) != bool(budgets):
        missing = "budget" if policies else "policy"
        raise ConfigError(f"{missing}: expected at least one; give both, or neither for the full cache alone")
    for name in formats:
        if name not in ("auto", *KV_FORMATS):
            known = ["auto", *KV_FORMATS]
            raise ConfigError(
                f"kv_cache_dtype: unknown format {name!r}; {suggest(name, known)}known: {', '.join(known)}"
            )
    resolved = {name: resolve_policy(name) for name in policies}
    settings = []
    for kv_format in dict.fromkeys(formats):
        settings.append(Setting(FULL, None, None, kv_format))
        for name, policy in resolved.items():
            own = prefill_stride
            if own is None and least_prefill_stride is not None:
                own = max(least_prefill_stride, policy.window)
            for budget in dict.fromkeys(budgets):
                setting = Setting(name, policy, budget, kv_format, stride, own)
                SamplingParams(**setting.params)  # whose messages name the field
                settings.append(setting)
    return Grid(tuple(settings))


def engine_settings(kv_format: str, own: dict[str, Any]) -> dict[str, Any]:
    """Settings of the engine for one format. `own` are those that the user gave.

    Blocks are not shared between requests unless asked for: they would count for each of them. Raises ConfigError.
    """
    settings = {"enable_prefix_caching": False, "max_model_len": "auto", **own, "kv_cache_dtype": kv_format}
    EngineConfig(**{"model": "not looked at", **settings})
    return settings
