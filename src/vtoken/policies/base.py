"""`Policy`: which tokens may die. When, and how many, and what becomes of their memory, is none of its business."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vtoken.base.errors import ConfigError, describe
from vtoken.policies.parameters import Count, Recent, Whole, check_fields, unify_numbers
from vtoken.policies.statistics import STATISTICS, Statistic


@dataclass(frozen=True, eq=False)
class TokenView:
    """The live tokens of some sequences, each row of the arrays one sequence's, in order of position, padded behind.

    `view[Sum()]` is a statistic that the policy needs, float64 [lanes, tokens]. A live token has NaN there if nobody
    has read it yet; such a token does not die. What stands in padding means nothing. The arrays are read-only.

    How wide the padding is depends on which sequences happen to be asked about together, so no score may depend on it:
    sums over tokens go through `vtoken.policies.arithmetic`.

    Nor may it depend on where tokens lie, so `blocks` counts along the text. A token lies there, among those of its
    block, unless tokens were packed or a block was shared when it was written.
    """

    positions: NDArray[np.int32]  # [lanes, tokens]
    is_live: NDArray[np.bool_]  # [lanes, tokens] False in the padding
    blocks: NDArray[np.int32]  # [lanes, tokens] which block of the text the token belongs to
    num_live: NDArray[np.int32]  # [lanes]
    lengths: NDArray[np.int32]  # [lanes] tokens of the text so far
    budgets: NDArray[np.int32]  # [lanes] live tokens that are to stay
    statistics: Mapping[str, NDArray[np.float64]]

    def __post_init__(self) -> None:
        for field in fields(self)[:-1]:
            object.__setattr__(self, field.name, _read_only(getattr(self, field.name)))
        statistics = {name: _read_only(values) for name, values in self.statistics.items()}
        object.__setattr__(self, "statistics", statistics)

    def __getitem__(self, statistic: Statistic) -> NDArray[np.float64]:
        return self.statistics[statistic.name]

    def is_before_last(self, count: int | NDArray[Any]) -> NDArray[np.bool_]:
        """[lanes, tokens]: live, and not among the last `count` (or [lanes] counts) tokens of the text."""
        ends = self.lengths - np.asarray(count)
        before: NDArray[np.bool_] = self.is_live & (self.positions < ends[:, None])
        return before


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Scores the live tokens of many sequences at once; the lowest scores die first, ties from the oldest position on.

    A policy is a frozen dataclass: its parameters are its fields, so `h2o:recent=64` on a command line and
    `H2O(recent=64)` in Python mean the same. The runtime never asks it to give up the first `sinks` tokens, the last
    `recent` ones, or what the request has pinned.

    Its parameters are checked when it is made; ConfigError names the one at fault. Two decisions must not count the
    same queries, so a stride below the observation window is refused. Requests with equal policies are decided about
    together, so `==` has to give a bool: a table of numbers is a tuple, no array.
    """

    name: ClassVar[str]
    """What users call it: lower case, with underscores."""
    source: ClassVar[str]
    """Paper or code whose definition it follows, and where it differs ("uniform variant: ...")."""
    whole_blocks: ClassVar[bool] = False
    """Whether it gives up whole blocks only, the lowest mean score first."""
    keeps_window: ClassVar[bool] = False
    """Whether the tokens whose queries it looks at, the last `window`, are protected as `recent` ones are."""
    _is_checked: ClassVar[bool] = False

    sinks: Whole = 0
    """Tokens at the beginning of the text that never die."""
    recent: Recent = 1
    """Tokens at its end that do not die yet: a number, or as a float a share of the budget."""
    stride: Count | None = None
    """Tokens from one decision to the next while an answer grows; None = a block, or the window if that is longer."""
    prefill_stride: Count | None = 512
    """The same for a prompt that is longer than the budget; None = one decision, at its end."""

    def __post_init__(self) -> None:
        check_policy(self)

    @property
    def needs(self) -> tuple[Statistic, ...]:
        """The statistics that `score` reads."""
        return ()

    @abstractmethod
    def score(self, view: TokenView) -> NDArray[np.floating[Any]]:
        """[lanes, tokens]: the higher, the longer a token is kept."""

    @property
    def window(self) -> int:
        """The most queries before a decision that a statistic of it looks at; 0 = it looks at none, or at all."""
        windows = [getattr(statistic, "window", 0) for statistic in self.needs]
        return max(windows, default=0)

    def num_recent(self, budget: int) -> int:
        """Protected tokens at the end of the text for a budget in tokens."""
        recent = int(self.recent * budget) if isinstance(self.recent, float) else self.recent
        return max(recent, self.window) if self.keeps_window else recent

    def check_budget(self, budget: int) -> None:
        """Raise ConfigError for a budget (tokens) in which nothing but protected tokens has room."""
        recent = self.num_recent(budget)
        if budget < self.sinks + recent + 1:
            raise ConfigError(
                f"kv_budget={budget} is too small for {self.name}: it protects {self.sinks} first and {recent} recent "
                f"tokens, so it needs at least {self._least_budget()}"
            )

    def _least_budget(self) -> int:
        # A share of recent tokens grows with the budget, but more slowly.
        share = self.recent if isinstance(self.recent, float) else 0.0
        budget = int(self.sinks / (1.0 - share)) + 1
        return max(budget, self.sinks + self.num_recent(budget) + 1)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array = array.view()
    array.flags.writeable = False
    return array


def check_policy(policy: Policy) -> None:
    """Raise ConfigError for a policy that is not made as one, or contradicts itself. Looks at each but once."""
    if policy._is_checked:
        return
    of = type(policy)
    if "__dataclass_fields__" not in vars(of):
        raise ConfigError(f"policy {of.__qualname__}: write @dataclass(frozen=True) above the class")
    for attribute in ("name", "source"):
        if not isinstance(getattr(of, attribute, None), str):
            raise ConfigError(f"policy {of.__qualname__}: give the class a {attribute}, a text")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", policy.name):
        raise ConfigError(f"policy {of.__qualname__}: a name is lower case with underscores, got {policy.name!r}")
    check_fields(policy, Policy, policy.name)  # however a subclass annotates these
    check_fields(policy, of, policy.name)
    unify_numbers(policy, of)
    _check_equality(policy)
    needs = policy.needs
    if not isinstance(needs, tuple) or not all(type(need) in STATISTICS for need in needs):
        known = ", ".join(each.__name__ for each in STATISTICS)
        raise ConfigError(f"{policy.name}: needs: expected a tuple of statistics ({known}), got {needs!r}")
    for field in ("stride", "prefill_stride"):
        stride = getattr(policy, field)
        if stride is not None and stride < policy.window:
            raise ConfigError(
                f"{policy.name}: {field}={stride} is below the {policy.window} queries it looks at before each "
                "decision, so that two decisions would count the same ones"
            )
    object.__setattr__(policy, "_is_checked", True)


def _check_equality(policy: Policy) -> None:
    """Raise ConfigError unless `==` tells the policy from others, with a bool."""
    of = type(policy)
    compared = [field.name for field in fields(of) if field.compare]
    own = [name for name in compared if name not in Policy.__dataclass_fields__]
    if own and of.__eq__ is Policy.__eq__:
        raise ConfigError(f"{policy.name}: its == does not look at {', '.join(own)}; leave out eq=False")
    twin = copy(policy)
    for name in compared:
        object.__setattr__(twin, name, _twin(getattr(policy, name)))
    code = getattr(of.__eq__, "__code__", None)
    if code is None or code.co_filename != Policy.__eq__.__code__.co_filename:  # not made by @dataclass
        wrong = _wrong_with_equality(policy, twin)
        if wrong is not None:
            raise ConfigError(f"{policy.name}: its == {wrong}, but has to tell it from other policies")
        return
    for name in compared:
        value = getattr(policy, name)
        wrong = _wrong_with_equality(value, getattr(twin, name))
        if wrong is not None:
            raise ConfigError(
                f"{policy.name}: {name}: expected what == tells apart, as it does numbers, texts and tuples of them; "
                f"that of a {type(value).__name__} {wrong}"
            )


def _twin(value: Any) -> Any:
    """Its equal, but not the same: Python takes what is the same for equal, and does not look into it."""
    try:
        return deepcopy(value)
    except Exception:  # locks, files
        return value


def _wrong_with_equality(one: object, twin: object) -> str | None:
    for other in (twin, object()):
        try:
            answer = one == other
        except Exception as error:
            return f"raises {describe(error)}"
        if not isinstance(answer, bool | np.bool_):
            return f"gives a {type(answer).__name__}, no bool"
    return None
