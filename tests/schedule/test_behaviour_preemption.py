"""U11, U22: preemption is seen in the counters and in nothing else."""

from __future__ import annotations

import pytest

from tests.driving import Driver, evict_every_other_prompt, tokens
from vtoken.schedule.preemption import PreemptionCosts
from vtoken.schedule.sequence import FinishReason


class TestU11SwapSpaceIsGone:
    @pytest.mark.parametrize("num_host_blocks", [0, 2])
    def test_it_falls_back_to_recompute(self, num_host_blocks: int) -> None:
        driver = Driver(num_blocks=20, block_size=16, preemption="swap", num_host_blocks=num_host_blocks)
        for i in range(10):
            driver.add(tokens(32, i), 64, n=4, temperature=1.0)
        driver.run()
        answers = [sequence for request in driver.requests for sequence in request.sequences]
        assert len(answers) == 40
        assert {(len(a.output_token_ids), a.finish_reason) for a in answers} == {(64, FinishReason.LENGTH)}
        assert driver.counters.swap_fallbacks > 0
        assert driver.counters.preemptions_recompute >= driver.counters.swap_fallbacks
        assert num_host_blocks > 0 or driver.counters.preemptions_swap == 0

    def test_a_full_host_pool_serves_again_when_it_has_room(self) -> None:
        driver = Driver(num_blocks=20, block_size=16, preemption="swap", num_host_blocks=6)
        for i in range(10):
            driver.add(tokens(32, i), 64)
        driver.run()
        assert driver.counters.swap_fallbacks > 0
        assert driver.counters.preemptions_swap > 0


class TestU22OutputAfterPreemption:
    @pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
    @pytest.mark.parametrize("evicts", [False, True])
    def test_it_is_that_of_the_undisturbed_run(self, preemption: str, evicts: bool) -> None:
        """Tokens, their streaming step by step, counts and deaths (the driver checks that nothing repeats or lacks)."""

        def run(num_blocks: int) -> Driver:
            costs = PreemptionCosts(100, 4, 250.0, 1.0, 0.05, 10.0)  # swap from about 40 tokens on
            driver = Driver(
                num_blocks=num_blocks,
                block_size=4,
                preemption=preemption,
                num_host_blocks=num_blocks,
                costs=costs,
                max_num_batched_tokens=48,
                evictor=evict_every_other_prompt() if evicts else None,
            )
            return driver.add_crowd().run()

        undisturbed, disturbed = run(300), run(30)
        assert undisturbed.counters.preemptions == 0
        assert disturbed.counters.preemptions > 0
        assert (disturbed.counters.preemptions_swap > 0) == (preemption != "recompute")
        assert (disturbed.counters.preemptions_recompute > 0) == (preemption != "swap")
        assert disturbed.outputs == undisturbed.outputs
        assert disturbed.counters.tokens_generated == undisturbed.counters.tokens_generated
        for one, other in zip(disturbed.requests, undisturbed.requests, strict=True):
            assert [s.died_at for s in one.sequences] == [s.died_at for s in other.sequences]
            assert one.num_prompt_tokens == other.num_prompt_tokens

    def test_it_is_counted_for_its_request(self) -> None:
        driver = Driver(num_blocks=30, block_size=4, max_num_batched_tokens=48).add_crowd().run()
        assert sum(request.num_preemptions for request in driver.requests) == driver.counters.preemptions > 0
