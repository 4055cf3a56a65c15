"""X4: the pressure ladder in its order, eviction only when needed, and each answer says what was kept and evicted."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.driving import Driver, tokens
from tests.engine.recorded import Demand, record
from tests.tiny_models import VOCAB_SIZE, save_planted_llama


def test_x04_the_rungs_are_climbed_one_after_the_other() -> None:
    """Cached blocks first, then holes, then tokens, then somebody's place."""
    driver = Driver(num_blocks=40, block_size=8)
    driver.add(tokens(60, 50), 4)
    driver.run()
    assert driver.memory.prefix.num_cached > 0
    holed = driver.add(tokens(90, 0), 90)  # loses tokens by order, so it has holes
    driver.step()
    driver.step()
    driver.scheduler.evict(holed.sequences[0], [p for p in range(2, 60) if p % 2])
    driver._deaths[holed.sequences[0]] = driver.scheduler.died_at(holed.sequences[0])
    for i in range(1, 3):
        driver.add(tokens(80, i), 120, kv_policy="random", kv_budget=32)
    for i in range(3, 5):
        driver.add(tokens(30, i), 120)  # may lose nothing
    first: dict[str, int] = {}
    while driver.scheduler.num_unfinished:
        driver.step()
        counters = driver.counters
        climbed = {
            "forget": counters.forgets,
            "reclaim": counters.reclaims,
            "evict": counters.evictions,
            "preempt": counters.preemptions,
        }
        for rung, count in climbed.items():
            if count:
                first.setdefault(rung, counters.steps)
    driver.check_outputs()
    assert list(first) == ["forget", "reclaim", "evict", "preempt"]
    assert first["forget"] <= first["reclaim"] <= first["evict"] <= first["preempt"]


def test_x04_each_answer_says_how_many_tokens_were_kept_and_evicted(tmp_path: Path) -> None:
    folder = save_planted_llama(tmp_path)
    random = np.random.default_rng(4)
    demands = [
        Demand(random.integers(0, VOCAB_SIZE, 80).tolist(), i, {"max_tokens": 40, "temperature": 0.0}) for i in range(3)
    ]
    common = {"block_size": 8, "max_model_len": 128, "kv_policy": "h2o", "kv_budget": 32, "kv_stride": 8}
    roomy = record(folder, demands, num_blocks=100, **common)
    assert [(c.num_kept, c.num_evicted, c.died_at) for o in roomy.outputs for c in o.outputs] == [(120, 0, {})] * 3
    tight = record(folder, demands, num_blocks=30, **common)
    choices = [choice for output in tight.outputs for choice in output.outputs]
    assert sum(choice.num_evicted for choice in choices) == tight.stats.memory.tokens_evicted > 0
    for choice in choices:
        assert choice.num_kept + choice.num_evicted == 120
        assert choice.num_evicted == len(choice.died_at)
        assert choice.num_kept >= 32
