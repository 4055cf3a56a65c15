"""What can ever fit: requests that cannot are refused when they arrive, in numbers that help."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from vtoken.base.config import KVMode
from vtoken.base.errors import CapacityError, ConfigError, RequestError
from vtoken.schedule.retention import Retention

MAX_LENGTH = 2**31 - 1  # lengths travel as int32


@dataclass(frozen=True)
class Capacity:
    """What an engine with nothing else to do could hold."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    kv_mode: KVMode = "vtoken"

    def blocks_for_request(
        self, num_prompt_tokens: int, max_tokens: int, n: int, retention: Retention | None = None
    ) -> int:
        """Most blocks that `n` choices hold together: they share the full blocks of the prompt.

        The last token drawn is never computed, so it needs no slot; with `max_tokens` 1 nobody writes after the prompt.
        Who loses tokens, and uses their cells again, never holds more than its peaks, and a block for what it shares.
        """
        size, longest = self.block_size, num_prompt_tokens + max_tokens - 1
        if max_tokens == 1:
            whole = -(-num_prompt_tokens // size)
        else:
            shared = num_prompt_tokens // size
            whole = shared + n * (-(-longest // size) - shared)
        if retention is None or self.kv_mode != "vtoken":
            return whole
        in_prompt = -(-retention.peak_in_prompt(num_prompt_tokens) // size) + 1
        kept = -(-retention.budget_at(num_prompt_tokens) // size) if n > 1 else 0
        after = kept + n * (-(-retention.peak_after_prompt(longest) // size) + 1)
        return min(whole, max(in_prompt, after if max_tokens > 1 else 0))

    def must_be_tight(self, num_prompt_tokens: int, max_tokens: int, n: int, retention: Retention | None) -> bool:
        """Whether a prompt has to be brought down to its budget before its choices fork, even if there are blocks: what
        several of them share nobody gives up under pressure."""
        if retention is None or retention.trigger == "always" or n == 1 or self.kv_mode != "vtoken":
            return False
        return self.blocks_for_request(num_prompt_tokens, max_tokens, n) > self.num_blocks

    def check_longest(self, retention: Retention | None) -> None:
        """Raise ConfigError unless the pool can serve one sequence of `max_model_len` tokens, of which `retention` says
        what stays."""
        largest = longest_sequence(self.num_blocks, self.block_size, retention, self.kv_mode)
        # The last token is never computed, so it needs no slot.
        if self.max_model_len - 1 > largest:
            raise ConfigError(
                f"max_model_len={self.max_model_len} is more than the pool serves: {self.num_blocks} blocks of "
                f"{self.block_size} tokens are enough for {largest}"
            )

    def check_prompt(self, num_prompt_tokens: int) -> None:
        """Raise RequestError for an empty prompt and one that leaves no room for an answer."""
        if num_prompt_tokens == 0:
            raise RequestError("prompt: expected at least one token, got none", "prompt")
        if num_prompt_tokens >= self.max_model_len:
            raise RequestError(
                f"prompt: {num_prompt_tokens} tokens leave no room for an answer: a sequence may have "
                f"{self.max_model_len} tokens (max_model_len), so a prompt at most {self.max_model_len - 1}",
                "prompt",
            )

    def clamp(
        self,
        num_prompt_tokens: int,
        max_tokens: int | None,
        n: int,
        retention: Retention | None = None,
        *,
        n_field: str = "n",
    ) -> int:
        """The new tokens a choice may have: `max_tokens`, or the room left if that is less. Where no length is asked
        for, choices that keep all their tokens share the room. `n_field` is what sets `n`.

        Raises RequestError for a prompt that can never be answered, CapacityError for choices that could never run
        together; each says what would fit.
        """
        self.check_prompt(num_prompt_tokens)
        room = self.max_model_len - num_prompt_tokens
        if max_tokens is None:
            together = room if n == 1 or retention is not None else self._length_together(num_prompt_tokens, n)
            max_tokens = max(1, together)
        clamped = min(room, max_tokens)
        if n > self.max_num_seqs:
            raise CapacityError(
                f"{n_field}: {n} choices can never run together, since at most {self.max_num_seqs} sequences can "
                f"(max_num_seqs); what fits: {n_field}={self._most_choices(num_prompt_tokens, clamped, retention)}",
                n_field,
            )
        needed = self.blocks_for_request(num_prompt_tokens, clamped, n, retention)
        if needed > self.num_blocks:
            if n == 1:
                raise self._too_long(num_prompt_tokens, clamped, needed, retention)
            raise CapacityError(
                f"{n_field}: {n} choices of {num_prompt_tokens} + {clamped} tokens need {needed} blocks of "
                f"{self.block_size} tokens together, but the pool has {self.num_blocks} "
                f"({self.num_blocks * self.block_size} tokens); what fits: "
                f"{n_field}={self._what_fits(num_prompt_tokens, clamped, n, retention)}",
                n_field,
            )
        return clamped

    def _too_long(
        self, num_prompt_tokens: int, max_tokens: int, needed: int, retention: Retention | None
    ) -> CapacityError:
        """One sequence alone outgrows the pool: its text does, or what is kept of it at its peak."""
        if retention is None:
            field, what = "prompt", "a kv_policy with a kv_budget would need fewer, or take a larger pool"
        else:
            room = (self.num_blocks - 1) * self.block_size - retention.budget_at(num_prompt_tokens)
            stride = room - retention.policy.window
            field, what = "kv_budget", f"kv_budget={retention.budget} is too large for it"
            if stride >= max(1, retention.policy.window):
                what = (
                    f"with kv_budget={retention.budget} it needs a kv_prefill_stride of at most {stride}, and a "
                    f"kv_stride of at most {room}"
                )
        return CapacityError(
            f"prompt: {num_prompt_tokens} + {max_tokens} tokens need {needed} blocks of {self.block_size} tokens, but "
            f"the pool has {self.num_blocks}: {what}",
            field,
        )

    def _what_fits(self, num_prompt_tokens: int, max_tokens: int, n: int, retention: Retention | None) -> str:
        most = self._most_choices(num_prompt_tokens, max_tokens, retention)
        if retention is not None:
            return str(most)
        return f"{most} or max_tokens={max(1, self._length_together(num_prompt_tokens, n))}"

    def _length_together(self, num_prompt_tokens: int, n: int) -> int:
        """New tokens that each of `n` choices may have so that all fit together; below 1: they do not."""
        shared = num_prompt_tokens // self.block_size
        return (shared + (self.num_blocks - shared) // n) * self.block_size - num_prompt_tokens + 1

    def _most_choices(self, num_prompt_tokens: int, max_tokens: int, retention: Retention | None) -> int:
        """The largest n that fits, at least 1; blocks grow with n."""
        counts = range(1, self.max_num_seqs + 1)
        fits = bisect_right(
            counts, self.num_blocks, key=lambda n: self.blocks_for_request(num_prompt_tokens, max_tokens, n, retention)
        )
        return max(1, fits)


def longest_sequence(num_blocks: int, block_size: int, retention: Retention | None, kv_mode: KVMode = "vtoken") -> int:
    """Tokens of the longest sequence that the pool can serve alone: its own size, or with a budget whatever has peaks
    that fit. A long answer may fit where as long a prompt does not, which each request is told for itself."""
    pool = Capacity(num_blocks, block_size, MAX_LENGTH, 1, kv_mode)

    def needed(length: int) -> int:
        return pool.blocks_for_request(1, length, 1, retention)

    return bisect_right(range(MAX_LENGTH + 1), num_blocks, lo=1, key=needed) - 1
