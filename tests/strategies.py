"""Hypothesis strategies that more than one test draws from."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

# Mostly small, so that few tokens fill many blocks; odd ones; one, two and eight mask words.
BLOCK_SIZES = (4, 5, 7, 16, 33, 64, 256)


def block_sizes() -> st.SearchStrategy[int]:
    """Block sizes from 4 to 256."""
    return st.one_of(st.sampled_from((4, 4, 5, 7)), st.sampled_from(BLOCK_SIZES))


@dataclass(frozen=True)
class Document:
    """A text given by blocks, so that texts of any block size begin alike and part somewhere."""

    num_common: int  # blocks it has in common with every other text
    num_own: int  # blocks it has in common with those of the same `num_common`
    rest: int  # tokens more

    def tokens(self, block_size: int) -> list[int]:
        """At least one token."""
        own = [1] * (self.num_own * block_size + self.rest % block_size)
        return [0] * (self.num_common * block_size) + own or [1]


def documents() -> st.SearchStrategy[Document]:
    return st.builds(Document, st.integers(0, 3), st.integers(0, 2), st.integers(0, 255))


def salts() -> st.SearchStrategy[int]:
    """Tenants; most requests have none (0)."""
    return st.sampled_from((0, 0, 0, 1, 2))


def live_counts(block_size: int, max_blocks: int = 6) -> st.SearchStrategy[list[int]]:
    """Live tokens in each of a sequence's blocks."""
    return st.lists(st.integers(0, block_size), max_size=max_blocks)


@st.composite
def deaths(draw: st.DrawFn, num_tokens: int) -> dict[int, list[int]]:
    """Length of a text of `num_tokens` -> the positions that die there, each once; at up to four lengths."""
    died: dict[int, list[int]] = {}
    dead: set[int] = set()
    for length in sorted(draw(st.sets(st.integers(1, num_tokens), max_size=4))):
        victims = draw(st.sets(st.integers(0, length - 1))) - dead
        died[length] = sorted(victims)
        dead |= victims
    return died
