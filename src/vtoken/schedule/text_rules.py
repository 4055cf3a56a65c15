"""Rules that requests give as text, turned into tokens: by whoever has the tokenizer, since the scheduler has none."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray


class TokenConstraint(Protocol):
    """Where one answer stands in the form that it must have.

    Its state follows from the tokens it was told last, so whatever became of the answer meanwhile (computed again,
    swapped, forked, rewritten by a beam search) it is right again at the next `follow`.
    """

    num_words: int
    """Of a mask, 32 tokens a word: as wide as the model's logits at least, and the same for all of an engine."""
    error: str | None
    """Why it can follow the answer no longer, in the user's words; it allows no token then."""

    @property
    def is_over(self) -> bool:
        """The answer is complete and nothing but an end can come."""
        ...

    def copy(self) -> Self:
        """One for another answer, in the state of this one."""
        ...

    def follow(self, answer: SequenceOf[int]) -> None:
        """Come to the state behind the tokens `answer`, the whole of it, whatever the state was."""
        ...

    def fill(self, words: NDArray[np.uint32]) -> None:
        """Write which tokens may come next, every bit of `words` [num_words]: bit `i % 32` of `words[i // 32]` is token
        `i`."""
        ...


@dataclass(frozen=True)
class TextRules:
    """What a request says in text about its answers, in tokens."""

    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of tokens that are never completed
    constraint: TokenConstraint | None = None  # at the beginning of an answer


NO_TEXT_RULES = TextRules()


class BadWords:
    """Runs of tokens that must not come up in an answer. Only the answer is looked at, as in vLLM, not the prompt."""

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        words = set(words)
        self.single: NDArray[np.int32] = np.array(sorted(word[0] for word in words if len(word) == 1), np.int32)
        # By the last token that comes before the forbidden one: few of them are in question at any place.
        self._longer: dict[int, list[tuple[list[int], int]]] = {}
        for word in sorted(word for word in words if len(word) > 1):
            self._longer.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))

    def __bool__(self) -> bool:
        return bool(len(self.single) or self._longer)

    def completing(self, token_ids: list[int], num_prompt_tokens: int) -> list[int]:
        """The tokens, single ones aside, that would complete one of the words behind prompt and answer `token_ids`."""
        if not self._longer or len(token_ids) <= num_prompt_tokens:
            return []
        return [
            last
            for prefix, last in self._longer.get(token_ids[-1], ())
            if len(token_ids) - len(prefix) >= num_prompt_tokens and token_ids[-len(prefix) :] == prefix
        ]
