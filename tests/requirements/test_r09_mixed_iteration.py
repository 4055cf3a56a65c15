"""R9: prompt and decode tokens go through the model in one iteration."""

from __future__ import annotations

import numpy as np

from tests.driving import Driver, tokens


def test_prompts_and_decodes_share_a_step() -> None:
    driver = Driver(num_blocks=200, max_num_batched_tokens=64, keep_plans=True)
    driver.add(tokens(7, 0), 20)
    driver.add(tokens(9, 1), 20)
    driver.step()
    driver.add(tokens(30, 2), 20)
    driver.add(tokens(100, 3), 20)
    driver.step()
    plan = driver.plans[-1]
    assert np.diff(plan.starts).tolist() == [1, 1, 30, 32]  # two decodes, a whole prompt, a chunk
    assert plan.past_live.tolist() == [7, 9, 0, 0]
    assert plan.sampling.slices.tolist() == [0, 1, 2]  # the chunk draws nothing
    driver.run()
    mixed = [plan for plan in driver.plans if {1} < set(np.diff(plan.starts).tolist())]
    assert len(mixed) >= 2
