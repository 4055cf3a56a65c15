"""What a policy may ask to know of a token: a closed list of reducers, the same for every backend.

All are reduced over heads and layers, so that one number a token is left. There are two kinds:

- an `AttentionStatistic` is gathered while queries attend, and added up from step to step;
- a `CacheStatistic` is read from the keys and values that lie in the cache, when somebody is about to decide.

Parameters are checked when a statistic is made: ConfigError for a window of 0, a threshold that is no number, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vtoken.policies.parameters import Count, Whole, check_fields, unify_numbers


@dataclass(frozen=True)
class Statistic:
    """One reducer. Equal statistics are one column of the token table, filed under `name`."""

    def __post_init__(self) -> None:
        check_fields(self, type(self), type(self).__name__)
        unify_numbers(self, type(self))  # or equal ones would have several names

    @property
    def name(self) -> str:
        """The class and its parameters: the same for equal statistics, and for no others."""
        parameters = ", ".join(f"{key}={value}" for key, value in vars(self).items())
        return f"{type(self).__name__}({parameters})"

    @property
    def about(self) -> str:
        """A few words for people who choose a policy."""
        raise NotImplementedError

    @property
    def is_over_all_queries(self) -> bool:
        """Whether every query of the text counts, so that none may be left out by a hit in the prefix cache."""
        return False


@dataclass(frozen=True)
class AttentionStatistic(Statistic):
    """Added up over the queries of a text, or over its last `window` ones before a decision."""

    @property
    def last(self) -> int | None:
        """How many queries before a decision count; None = all of the text."""
        return getattr(self, "window", None)

    @property
    def is_over_all_queries(self) -> bool:
        return self.last is None


@dataclass(frozen=True)
class CacheStatistic(Statistic):
    """A function of the keys and values of the live tokens."""

    @property
    def is_fixed(self) -> bool:
        """Whether a token's value does not depend on the other tokens, so that it is read once."""
        return False


@dataclass(frozen=True)
class Sum(AttentionStatistic):
    """The attention a token drew: its probabilities, summed over all queries, query heads and layers."""

    @property
    def about(self) -> str:
        return "attention of all queries"


@dataclass(frozen=True)
class SumLast(AttentionStatistic):
    """The same over the last `window` queries before the decision."""

    window: Count

    @property
    def about(self) -> str:
        return "attention of the last query" if self.window == 1 else f"attention of the last {self.window} queries"


@dataclass(frozen=True)
class CountLow(AttentionStatistic):
    """How often, over the last `window` queries, all query heads and layers, a token drew less than its share: a
    probability below `1 / t` where the query sees `t` tokens."""

    window: Count

    @property
    def about(self) -> str:
        return f"how often below average attention, last {self.window} queries"


@dataclass(frozen=True)
class KeyNorm(CacheStatistic):
    """L2 norm of the key, averaged over KV heads and layers."""

    @property
    def is_fixed(self) -> bool:
        return True

    @property
    def about(self) -> str:
        return "norms of keys"


@dataclass(frozen=True)
class ValueNorm(CacheStatistic):
    """L2 norm of the value, averaged over KV heads and layers."""

    @property
    def is_fixed(self) -> bool:
        return True

    @property
    def about(self) -> str:
        return "norms of values"


@dataclass(frozen=True)
class KeySimilarity(CacheStatistic):
    """Cosine of a token's key with the mean of all live keys, each of length one, averaged over KV heads and layers."""

    @property
    def about(self) -> str:
        return "cosines of keys with their mean"


@dataclass(frozen=True)
class KeyRedundancy(CacheStatistic):
    """How much of a token's key the others say too (R-KV, arXiv:2505.24133), averaged over KV heads and layers: of
    token j, the mean over all n live tokens i of the cosine of their keys.

    The cosine of j with itself counts as 0. So does that with a token i if j is, in order of position, the last token
    whose cosine with i is above `threshold`: of several similar tokens the newest one is not redundant.
    """

    threshold: float = 0.5

    @property
    def about(self) -> str:
        return "cosines of keys with each other"


@dataclass(frozen=True)
class LagDeviation(CacheStatistic):
    """How far keys and values stick out of the range that the next `lag` tokens span (LagKV, arXiv:2504.04704).

    Live tokens behind the first `sinks` are cut into full runs of `lag` in order of position. In each run but the last,
    each channel is scaled by the minimum and maximum that it has in the next run (0 where those are equal); a token's
    standard deviation over its channels (n - 1 in the denominator) goes through a softmax over its run; keys and values
    are added, heads and layers averaged. The first `sinks`, the last full run, and what is too short for a run behind
    it, get infinity.
    """

    lag: Count
    sinks: Whole

    @property
    def about(self) -> str:
        return f"keys and values against those of the next {self.lag} tokens"


@dataclass(frozen=True)
class FutureAttention(CacheStatistic):
    """The attention a token may expect from queries to come (Expected Attention, arXiv:2510.00636), times the norm of
    its value, averaged over query heads and layers: queries are taken to be distributed as the last `window` ones
    before the decision were, turned to the next `horizon` positions."""

    horizon: Count = 512
    window: Count = 128

    @property
    def about(self) -> str:
        return f"keys and values against the last {self.window} queries"


STATISTICS: Final = (
    Sum, SumLast, CountLow, KeyNorm, ValueNorm, KeySimilarity, KeyRedundancy, LagDeviation, FutureAttention
)  # fmt: skip
"""All there are."""
