"""`Retention`: what one request keeps of its text, and the places in it where the rest is given up."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np

from vtoken.base.errors import ConfigError, RequestError
from vtoken.policies.base import Policy
from vtoken.policies.statistics import AttentionStatistic

Trigger = Literal["pressure", "always"]
AT_THE_END = 0  # as a prefill stride: the prompt is computed whole before anything dies


@dataclass(frozen=True)
class Retention:
    """A policy, a budget, and when it is applied. Lengths are tokens of the text, prompt and answer.

    With `trigger="always"` tokens die at fixed places, which depend on the request and on nothing else: in the prompt
    whenever `budget + prefill_stride` tokens are live, at its end, and then every `stride` tokens. With "pressure" they
    die when blocks are short; only a prompt for which there are too few blocks is cut as with "always".
    """

    policy: Policy
    budget: int | float  # live tokens, or a share of the text
    trigger: Trigger
    stride: int
    prefill_stride: int  # or AT_THE_END
    pins: tuple[tuple[int, int], ...] = ()  # [start, end) positions that never die
    # Length at which the prompt ends for all of this, if it is not the whole: the rest of it counts as answer.
    prompt_end: int | None = None

    def budget_at(self, length: int) -> int:
        """Tokens that may stay of a text of `length` tokens."""
        return max(1, ceil(self.budget * length)) if isinstance(self.budget, float) else self.budget

    def next_place(self, length: int, num_live: int, num_prompt_tokens: int) -> int:
        """The next length at which tokens die, for a text of `length` tokens of which `num_live` live."""
        prompt = self._end_of(num_prompt_tokens)
        if length >= prompt:
            return prompt + ((length - prompt) // self.stride + 1) * self.stride
        if self.prefill_stride == AT_THE_END:
            return prompt
        # The first length L with num_live + (L - length) >= budget at L + prefill_stride, sought from just below.
        share = self.budget if isinstance(self.budget, float) else 0.0
        fixed = 0 if share else self.budget
        place = max(length + 1, int((fixed + self.prefill_stride + length - num_live) / (1 - share)) - 2)
        while num_live + place - length < self.budget_at(place) + self.prefill_stride:
            place += 1
        # Two decisions must not look at the same queries: each has a window of its own.
        return prompt if place + self.policy.window > prompt else place

    def _end_of(self, num_prompt_tokens: int) -> int:
        return num_prompt_tokens if self.prompt_end is None else min(self.prompt_end, num_prompt_tokens)

    def peak_in_prompt(self, num_prompt_tokens: int) -> int:
        """The most tokens that live at once while the prompt is computed, if it is cut at its places."""
        prompt = self._end_of(num_prompt_tokens)
        peak = prompt
        if self.prefill_stride != AT_THE_END:
            window = self.policy.window  # by which the last place may be put off
            peak = min(prompt, self.budget_at(prompt) + self.prefill_stride + window)
        return peak if prompt == num_prompt_tokens else max(peak, self.peak_after_prompt(num_prompt_tokens))

    def peak_after_prompt(self, length: int) -> int:
        """The most tokens that live at once while an answer grows to a text of `length` tokens."""
        return min(length, self.budget_at(length) + self.stride)

    def most_matched(self, num_prompt_tokens: int) -> int:
        """Tokens at the beginning of the text that may come from the prefix cache without a policy noticing."""
        if self.trigger == "pressure":
            return num_prompt_tokens
        if any(isinstance(need, AttentionStatistic) and need.is_over_all_queries for need in self.policy.needs):
            return 0
        return self.next_place(0, 0, num_prompt_tokens) - max(1, self.policy.window)

    def check(self, num_prompt_tokens: int, block_size: int) -> None:
        """Raise RequestError for windows of two decisions that would overlap, pins outside of the prompt, and a budget
        in which nothing but protected tokens has room."""
        policy = self.policy
        strides = {"kv_stride": self.stride, "kv_prefill_stride": self.prefill_stride or policy.window}
        for field, stride in strides.items():
            if stride < policy.window:
                raise RequestError(
                    f"{field}: {policy.name} looks at the last {policy.window} queries before each decision, so "
                    f"{field} must be at least {policy.window}, got {stride}",
                    field,
                )
        for start, end in self.pins:
            if end > num_prompt_tokens:
                message = f"kv_pin: ({start}, {end}) goes past the prompt, which has {num_prompt_tokens} tokens"
                raise RequestError(message, "kv_pin")
        if self.prompt_end is not None and self.prompt_end > num_prompt_tokens:
            message = f"kv_prompt_end: {self.prompt_end} goes past the prompt, which has {num_prompt_tokens} tokens"
            raise RequestError(message, "kv_prompt_end")
        budget = self.budget_at(self._end_of(num_prompt_tokens))
        try:
            policy.check_budget(budget)
        except ConfigError as error:
            raise RequestError(str(error), "kv_budget") from None
        if not self.pins:
            return
        # Whole blocks die, or none of a block: a pin keeps all of its block.
        size = block_size if policy.whole_blocks else 1
        units = np.zeros(-(-num_prompt_tokens // size) + 1, np.bool_)
        for start, end in self.pins:
            units[start // size : -(-end // size)] = True
        units[: -(-policy.sinks // size)] = False
        num_pinned = int(np.count_nonzero(units)) * size
        num_first, num_recent = (-(-count // size) * size for count in (policy.sinks, policy.num_recent(budget)))
        # The block that is being filled stays whole, too.
        needed = num_first + num_recent + num_pinned + size + (size if policy.whole_blocks else 0)
        if num_pinned and budget < needed:
            kept = "kept by pins (whole blocks)" if size > 1 else "pinned ones"
            raise RequestError(
                f"kv_budget: {budget} tokens are too few for {num_pinned} {kept}, {num_first} first and {num_recent} "
                f"recent ones, and {size} that may die: at least {needed}",
                "kv_budget",
            )


@dataclass(frozen=True)
class RetentionSettings:
    """What an engine, or a request, says of it; None = nothing, so what stands behind decides."""

    policy: Policy | None = None
    budget: int | float | None = None
    trigger: Trigger | None = None
    stride: int | None = None
    prefill_stride: int | None = None
    pins: tuple[tuple[int, int], ...] = ()
    prompt_end: int | None = None

    def resolve(self, defaults: RetentionSettings, block_size: int) -> Retention | None:
        """Settings of a request in front of those of its engine; None = every token is kept.

        Raises RequestError, with the field at fault, for settings without the policy or the budget they need.
        """
        policy, budget = self.policy or defaults.policy, self.budget or defaults.budget
        if policy is None or budget is None:
            given = {
                "kv_policy": self.policy,
                "kv_budget": self.budget,
                "kv_trigger": self.trigger,
                "kv_stride": self.stride,
                "kv_prefill_stride": self.prefill_stride,
                "kv_pin": self.pins or None,
                "kv_prompt_end": self.prompt_end,
            }
            field = next((name for name, value in given.items() if value is not None), None)
            if field is None:
                return None
            missing = (
                "a kv_policy, which says which tokens may die"
                if policy is None
                else "a kv_budget, in tokens (512) or as a share of the text (0.5)"
            )
            raise RequestError(f"{field}: has no effect without {missing}", field)
        stride = self.stride or defaults.stride or policy.stride or max(block_size, policy.window)
        prefill_strides = (self.prefill_stride, defaults.prefill_stride, policy.prefill_stride, AT_THE_END)
        return Retention(
            policy,
            budget,
            self.trigger or defaults.trigger or "pressure",
            stride,
            next(each for each in prefill_strides if each is not None),
            _merged(self.pins),
            self.prompt_end,
        )


def _merged(pins: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """The same positions in ranges that are in order and do not touch."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(set(pins)):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return tuple(merged)


KEEPS_ALL = RetentionSettings()
