"""A real model in this process as the place where an arm runs. Apart from the rest, since it imports torch."""

from __future__ import annotations

import time

from vtoken.base.clock import Clock, MonotonicClock
from vtoken.base.config import EngineConfig
from vtoken.bench.roofline import StepSeconds
from vtoken.bench.stages import Setting
from vtoken.engine.build import build_engine
from vtoken.executor.local import LocalExecutor
from vtoken.schedule.plan import StepPlan, StepResult


class EngineStage:
    """A real model, timed by the machine's clock or the one given. `model` is what `EngineConfig` takes."""

    counts_host = True

    def __init__(self, setting: Setting, model: str, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        config = EngineConfig(
            model=model,
            skip_tokenizer_init=True,
            block_size=setting.block_size,
            num_blocks=setting.num_blocks,
            max_model_len=setting.max_model_len,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            enable_prefix_caching=False,
            prefault_kv=True,
            kv_policy=setting.policy,
            kv_budget=setting.budget,
            kv_trigger=setting.trigger,
            kv_mode=setting.arm,
            kv_copies=setting.copies,
        )
        engine = build_engine(config, self._clock)
        assert isinstance(engine.executor, LocalExecutor), "one process, so copies can be timed by themselves"
        self._engine, self._executor = engine, engine.executor
        self.scheduler = engine.scheduler
        self.vocab_size = engine.facts.vocab_size
        self.bytes_per_token = engine.facts.bytes_per_block // setting.block_size

    def now(self) -> float:
        return self._clock.now()

    def wait_until(self, when: float) -> None:
        time.sleep(max(0.0, when - self._clock.now()))

    def execute(self, plan: StepPlan) -> tuple[StepResult, StepSeconds]:
        copies = self._executor.copies
        started, waited_before = time.perf_counter(), copies.seconds_waited
        result = self._executor.execute(plan)
        waited = copies.seconds_waited - waited_before
        return result, StepSeconds(time.perf_counter() - started - waited, waited if plan.copies else 0.0)

    def close(self) -> None:
        self._engine.close()
