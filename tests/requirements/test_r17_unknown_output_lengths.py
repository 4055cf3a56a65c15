"""R17, R18: nobody says how long an answer will be, and blocks hold more than one token: all of it is survived.

Requests ask for as much as there is room (`max_tokens=None`) and end when the model says so, after a few tokens or
after hundreds. The pool holds a fraction of what they could ask for together.
"""

from __future__ import annotations

import pytest

from tests.driving import Driver, tokens
from vtoken.schedule.sequence import FinishReason

VOCAB_SIZE = 60  # two of them end an answer, so lengths are geometric with a mean of 30


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("block_size", [4, 16, 48])
def test_answers_of_unknown_length_all_end_as_the_model_ends_them(block_size, preemption):
    driver = Driver(
        num_blocks=-(-480 // block_size),
        block_size=block_size,
        num_host_blocks=200 // block_size,
        preemption=preemption,
        max_model_len=300,
        vocab_size=VOCAB_SIZE,
        eos=frozenset({0, 1}),
    )
    for i in range(24):
        driver.add(tokens(5 + (7 * i) % 40, i, vocab_size=VOCAB_SIZE), None)
    driver.run()  # checks every answer against the model, and the books after every step
    lengths = sorted(len(answer) for [answer] in driver.outputs)
    assert lengths[0] < 10
    assert lengths[-1] > 60
    assert sum(lengths) + sum(r.num_prompt_tokens for r in driver.requests) > 2 * driver.num_blocks * block_size
    assert driver.counters.preemptions > 0
    assert {s.finish_reason for r in driver.requests for s in r.sequences} <= {FinishReason.STOP, FinishReason.LENGTH}
