"""What can ever fit: requests that cannot are refused when they arrive, in numbers that help."""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.base.errors import CapacityError, RequestError


@dataclass(frozen=True)
class Capacity:
    """What an engine with nothing else to do could hold."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int

    def blocks_for_request(self, num_prompt_tokens: int, max_tokens: int, n: int) -> int:
        """Most blocks that `n` choices hold together: they share the full blocks of the prompt.

        The last token drawn is never computed, so it needs no slot; with `max_tokens` 1 nobody writes after the prompt.
        """
        if max_tokens == 1:
            return -(-num_prompt_tokens // self.block_size)
        shared = num_prompt_tokens // self.block_size
        return shared + n * (-(-(num_prompt_tokens + max_tokens - 1) // self.block_size) - shared)

    def clamp(self, num_prompt_tokens: int, max_tokens: int | None, n: int) -> int:
        """The new tokens a choice may have: `max_tokens`, or the room left if that is less.

        Raises RequestError for an empty prompt and one that leaves no room, CapacityError for choices that could never
        run together; each says what would fit.
        """
        if num_prompt_tokens == 0:
            raise RequestError("prompt: expected at least one token, got none", "prompt")
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            raise RequestError(
                f"prompt: {num_prompt_tokens} tokens leave no room for an answer: a sequence may have "
                f"{self.max_model_len} tokens (max_model_len), so a prompt at most {self.max_model_len - 1}",
                "prompt",
            )
        clamped = room if max_tokens is None else min(room, max_tokens)
        if n > self.max_num_seqs:
            raise CapacityError(
                f"n: {n} choices can never run together, since at most {self.max_num_seqs} sequences can "
                f"(max_num_seqs); what fits: n={self._most_choices(num_prompt_tokens, clamped)}",
                "n",
            )
        needed = self.blocks_for_request(num_prompt_tokens, clamped, n)
        if needed > self.num_blocks:
            raise CapacityError(
                f"n: {n} choices of {num_prompt_tokens} + {clamped} tokens need {needed} blocks of {self.block_size} "
                f"tokens together, but the pool has {self.num_blocks} ({self.num_blocks * self.block_size} tokens); "
                f"what fits: {self._what_fits(num_prompt_tokens, clamped, n)}",
                "n",
            )
        return clamped

    def _what_fits(self, num_prompt_tokens: int, max_tokens: int, n: int) -> str:
        shared = num_prompt_tokens // self.block_size
        shorter = (shared + (self.num_blocks - shared) // n) * self.block_size - num_prompt_tokens + 1
        return f"n={self._most_choices(num_prompt_tokens, max_tokens)} or max_tokens={max(1, shorter)}"

    def _most_choices(self, num_prompt_tokens: int, max_tokens: int) -> int:
        if self.blocks_for_request(num_prompt_tokens, max_tokens, self.max_num_seqs) <= self.num_blocks:
            return self.max_num_seqs
        shared = num_prompt_tokens // self.block_size
        each = self.blocks_for_request(num_prompt_tokens, max_tokens, 1) - shared
        return (self.num_blocks - shared) // each
