"""Refusals: what can never fit is refused at once, and what the refusal names really fits."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.driving import Driver, evict_scattered, tokens
from vtoken.base.errors import CapacityError, RequestError
from vtoken.schedule.capacity import Capacity


def test_choices_share_the_full_blocks_of_the_prompt() -> None:
    capacity = Capacity(num_blocks=100, block_size=16, max_model_len=1600, max_num_seqs=32)
    assert capacity.blocks_for_request(32, 16, n=1) == 3
    assert capacity.blocks_for_request(32, 17, n=1) == 3  # the last token drawn is never computed
    assert capacity.blocks_for_request(32, 18, n=1) == 4
    assert capacity.blocks_for_request(32, 16, n=4) == 2 + 4
    assert capacity.blocks_for_request(33, 15, n=4) == 2 + 4  # the partly filled block is copied for each writer
    assert capacity.blocks_for_request(17, 1, n=4) == 2  # all draw from the same prompt, and nobody writes after it


@pytest.mark.parametrize(("asked", "given_"), [(None, 56), (4096, 56), (57, 56), (56, 56), (1, 1)])
def test_max_tokens_is_clamped_to_the_room_left(asked: int | None, given_: int) -> None:
    assert Capacity(64, 16, 256, 8).clamp(200, asked, 1) == given_


def test_errors_name_their_field_and_the_numbers() -> None:
    capacity = Capacity(num_blocks=8, block_size=16, max_model_len=128, max_num_seqs=4)
    with pytest.raises(RequestError, match="prompt: expected at least one token") as empty:
        capacity.clamp(0, 16, 1)
    with pytest.raises(RequestError, match=r"prompt: 128 tokens .* 128 tokens \(max_model_len\).* at most 127") as long:
        capacity.clamp(128, 16, 1)
    with pytest.raises(CapacityError, match=r"n: 5 choices .* at most 4 .* fits: n=4") as many:
        capacity.clamp(16, 16, 5)
    with pytest.raises(
        CapacityError, match=r"n: 4 choices of 20 \+ 60 tokens need 17 blocks.* has 8 \(128 tokens\)"
    ) as big:
        capacity.clamp(20, 60, 4)
    with pytest.raises(CapacityError, match=r"^best_of: 5 choices .* fits: best_of=4") as best:
        capacity.clamp(16, 16, 5, n_field="best_of")
    assert best.value.field == "best_of"
    assert [error.value.field for error in (empty, long, many, big)] == ["prompt", "prompt", "n", "n"]


@given(
    num_blocks=st.integers(1, 40),
    block_size=st.sampled_from([4, 5, 16]),
    short_by=st.integers(0, 20),
    max_num_seqs=st.integers(1, 12),
    prompt=st.integers(0, 200),
    max_tokens=st.none() | st.integers(1, 200),
    n=st.integers(1, 16),
)
def test_what_a_refusal_names_fits_and_the_next_larger_does_not(
    num_blocks: int,
    block_size: int,
    short_by: int,
    max_num_seqs: int,
    prompt: int,
    max_tokens: int | None,
    n: int,
) -> None:
    max_model_len = num_blocks * block_size - short_by
    assume(max_model_len >= 2)
    capacity = Capacity(num_blocks, block_size, max_model_len, max_num_seqs)
    refusal: RequestError | None = None
    try:
        clamped = capacity.clamp(prompt, max_tokens, n)
    except RequestError as error:
        refusal = error
    if refusal is None:
        assert 1 <= clamped <= max_model_len - prompt
        if max_tokens is not None or n == 1:
            assert clamped == min(max_tokens or max_model_len, max_model_len - prompt)
        elif clamped < max_model_len - prompt:  # the room is shared, and there is not a token more
            assert capacity.clamp(prompt, clamped, n) == clamped
            with pytest.raises(CapacityError):
                capacity.clamp(prompt, clamped + 1, n)
    elif isinstance(refusal, CapacityError):
        assert refusal.field == "n"
        assert str(refusal).startswith("n: ")
        most = int(re.search(r"fits: n=(\d+)", str(refusal))[1])
        assert 1 <= most < n
        assert capacity.clamp(prompt, max_tokens, most) >= 1
        if max_tokens is not None:
            with pytest.raises(CapacityError):
                capacity.clamp(prompt, max_tokens, most + 1)
        shorter = re.search(r"or max_tokens=(\d+)", str(refusal))
        assert (shorter is not None) == (n <= max_num_seqs)
        if shorter:
            assert capacity.clamp(prompt, int(shorter[1]), n) == int(shorter[1])
            with pytest.raises(CapacityError):
                capacity.clamp(prompt, int(shorter[1]) + 1, n)
    else:
        assert refusal.field == "prompt"
        assert str(refusal).startswith("prompt: ")
        if prompt:
            longest = int(re.search(r"a prompt at most (\d+)", str(refusal))[1])
            assert prompt > longest
            assert capacity.clamp(longest, max_tokens, 1) == 1


@given(
    block_size=st.sampled_from([4, 5, 8]),
    prompt=st.integers(1, 40),
    max_tokens=st.integers(1, 40),
    n=st.integers(1, 4),
    prefix=st.booleans(),
    budget=st.sampled_from([4, 16, 100]),
)
def test_the_blocks_that_are_promised_are_enough_and_none_is_too_many(
    block_size: int, prompt: int, max_tokens: int, n: int, prefix: bool, budget: int
) -> None:
    num_blocks = Capacity(10**6, block_size, 10**6, n).blocks_for_request(prompt, max_tokens, n)
    driver = Driver(
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=prefix,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        max_model_len=prompt + max_tokens,
    )
    request = driver.add(tokens(prompt, 1), max_tokens, n=n)
    driver.run()
    assert request.error is None
    assert driver.counters.preemptions == 0
    assert driver.counters.peak_held_blocks == num_blocks


def test_choices_that_share_a_block_with_holes_do_not_outgrow_it() -> None:
    # Each choice needs one more block for 16 tokens. A copy of the shared block would give it 10 cells only.
    holes = range(18, 28)
    driver = Driver(
        num_blocks=5,
        enable_prefix_caching=False,
        evictor=lambda sequence, length: holes if length == 32 else (),
    )
    request = driver.add(tokens(32, 1), 17, n=3)
    driver.run()
    assert request.error is None
    assert driver.memory.counters.blocks_copied_on_write == 0


@given(
    block_size=st.sampled_from([4, 5, 8]),
    prompt=st.integers(1, 40),
    max_tokens=st.integers(1, 40),
    n=st.integers(1, 4),
    prefix=st.booleans(),
    budget=st.sampled_from([4, 16, 100]),
    every=st.integers(1, 20),
    percent=st.sampled_from([10, 50, 90]),
    in_prompt=st.booleans(),
)
def test_they_are_enough_whatever_is_evicted_on_the_way(
    block_size: int,
    prompt: int,
    max_tokens: int,
    n: int,
    prefix: bool,
    budget: int,
    every: int,
    percent: int,
    in_prompt: bool,
) -> None:
    driver = Driver(
        num_blocks=Capacity(10**6, block_size, 10**6, n).blocks_for_request(prompt, max_tokens, n),
        block_size=block_size,
        enable_prefix_caching=prefix,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        max_model_len=prompt + max_tokens,
        evictor=evict_scattered(every, percent, in_prompt=in_prompt),
    )
    request = driver.add(tokens(prompt, 1), max_tokens, n=n)
    driver.run()
    assert request.error is None
