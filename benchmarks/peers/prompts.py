"""Prompts as token ids: slices of real text where there is some, seeded random ids where not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

DATA: Final = Path(__file__).resolve().parents[3] / "shared" / "data"
TEXTS: Final = (
    "gutenberg/sherlock_holmes_1661.txt",
    "gutenberg/frankenstein_84.txt",
    "wikitext2_raw/wiki.test.raw",
)


class PromptSource:
    """Cuts prompts out of one long run of token ids.

    Prompts never overlap, and those of one batch differ from their first token on, so that no prefix cache, grouping
    or sharing can help anybody. The same seed gives the same prompts.

    Raises ValueError when the text is too short for what is asked.
    """

    def __init__(self, token_ids: Sequence[int], seed: int) -> None:
        self._ids = token_ids
        self._random = random.Random(seed)
        self._next = 0

    def batch(self, lengths: Sequence[int]) -> list[list[int]]:
        """One prompt for each length, in that order, their first tokens all different."""
        prompts, firsts = [], set[int]()
        for length in lengths:
            start = self._next + self._random.randrange(8)
            while start < len(self._ids) and self._ids[start] in firsts:
                start += 1
            if start + length > len(self._ids):
                raise ValueError(
                    f"the text has {len(self._ids)} tokens, too few for {len(lengths)} more prompts of {sum(lengths)} "
                    "tokens that begin differently"
                )
            firsts.add(self._ids[start])
            prompts.append(list(self._ids[start : start + length]))
            self._next = start + length
        return prompts


def corpus(model_folder: Path, data: Path = DATA) -> tuple[list[int], str]:
    """(token ids, where they are from): the texts of the data folder, encoded by the model's tokenizer.

    A data folder without these texts gives 1,000,000 seeded random ids above the special tokens.
    """
    from tokenizers import Tokenizer  # here, since runners import this package without it

    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    texts = [data / name for name in TEXTS if (data / name).is_file()]
    if not texts:
        draw = random.Random(0)
        vocabulary = range(256, tokenizer.get_vocab_size())
        return [draw.choice(vocabulary) for _ in range(1_000_000)], "seeded random token ids"
    token_ids: list[int] = []
    for path in texts:
        text = path.read_text(encoding="utf-8", errors="replace")
        token_ids += tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids, ", ".join(path.name for path in texts)
