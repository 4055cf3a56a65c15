"""Nobody's answer changes by accident: whatever is asked gets in a crowd what it gets alone, to the bit.

Others share its blocks, come, go, are aborted, take the budget of a step and push it out of the memory. Everything is
drawn from one seed, so what fails fails again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_eviction import POLICIES
from tests.tiny_models import BOS, EOS, save_llama
from vtoken import LLM, SamplingParams
from vtoken.engine.outputs import RequestOutput

MODEL: dict[str, Any] = {"block_size": 8, "max_model_len": 256, "attention_backend": "reference", "seed": 0}
TIGHT: dict[str, Any] = {"num_blocks": 36, "max_num_seqs": 12, "max_num_batched_tokens": 48}
MEMORIES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap", "swap_space": "64KiB"},
    "beside": {"preemption": "swap", "swap_space": "1MiB", "kv_copies": "beside"},
    "little at a time": {"max_num_batched_tokens": 13},
    "no prefix cache": {"enable_prefix_caching": False},
}
FORMS: tuple[dict[str, Any], ...] = ({"regex": "[ab]{3,20}"}, {"choice": ["yes", "no", "perhaps"]})
SHARED = ("", "You are a helpful assistant. ", "You are a helpful assistant. Answer in one word: ")


@dataclass(frozen=True)
class Ask:
    prompt: str
    params: SamplingParams
    is_own: bool  # its answer depends on nothing but itself; under pressure it depends on the load, by nature


def draw(rng: random.Random) -> Ask:
    """Something that a pool of 36 blocks of 8 tokens can run."""
    prompt = rng.choice(SHARED) + "".join(rng.choices("abcdef ghij\n", k=rng.randint(1, 40)))
    kind = rng.choice(("plain", "choices", "best", "beams", "scores", "form", "stops", "penalties", "words"))
    asked: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "seed": rng.randrange(2**31)}
    asked["temperature"] = rng.choice((0.0, 0.7, 1.0))
    asked |= _special(kind, rng)
    if kind != "form" and rng.random() < 0.7:
        asked["ignore_eos"] = True
    trigger = None
    if rng.random() < 0.6:
        trigger = rng.choice(("pressure", "always", "always"))
        looks_back = "expected_attention"  # on queries of one sequence, and beams take over from each other
        policies = [policy for policy in POLICIES if kind != "beams" or not policy.startswith(looks_back)]
        asked |= {"kv_policy": rng.choice(policies), "kv_budget": rng.choice((24, 40)), "kv_trigger": trigger}
        asked |= {"kv_stride": 16, "kv_prefill_stride": 32}
    return Ask(prompt, SamplingParams(**asked), trigger != "pressure")


def _special(kind: str, rng: random.Random) -> dict[str, Any]:
    match kind:
        case "choices":
            return {"n": rng.randint(2, 3), "temperature": 1.0}
        case "best":
            return {"n": rng.randint(1, 2), "best_of": 3, "temperature": 1.0}
        case "beams":
            return {"n": rng.randint(1, 2), "best_of": 3, "use_beam_search": True, "temperature": 0.0}
        case "scores":
            return {"logprobs": rng.randint(0, 3), "prompt_logprobs": rng.choice((None, 2))}
        case "form":
            return {"structured_outputs": rng.choice(FORMS)}
        case "stops":
            return {"stop": rng.sample("abcdefgh", 3), "min_tokens": 1}
        case "penalties":
            return {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1, "top_p": 0.9}
        case "words":
            return {"bad_words": ["a", "b"], "logit_bias": {97: 3.0}, "top_k": 40, "min_p": 0.01}
    return {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("company"), tokenizer=True, bos_token_id=BOS, eos_token_id=EOS)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    """Room for everything and nobody beside."""
    with LLM(str(folder), num_blocks=512, **MODEL) as llm:
        yield llm


@pytest.mark.parametrize("memory", MEMORIES)
def test_in_a_crowd_as_alone(folder: Path, alone: LLM, memory: str) -> None:
    compare(folder, alone, memory, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
def test_in_many_crowds_as_alone(folder: Path, alone: LLM, memory: str) -> None:
    compare(folder, alone, memory, range(100, 120))


def compare(folder: Path, alone: LLM, memory: str, seeds: range) -> None:
    num_compared = 0
    with LLM(str(folder), **(MODEL | TIGHT | MEMORIES[memory])) as llm:
        for seed in seeds:
            for ask, output in crowd(llm, random.Random(seed), 40):
                [expected] = alone.generate(ask.prompt, ask.params, use_tqdm=False)
                assert answers(output) == answers(expected), (seed, output.request_id, ask)
                num_compared += 1
            llm.engine.scheduler.check()
        stats = llm.stats()
    assert num_compared > 15 * len(seeds)
    assert stats.usage.held_blocks == 0
    assert stats.scheduler.preemptions > 0
    assert stats.scheduler.tokens_evicted_at_places > 0
    assert stats.scheduler.tokens_evicted_under_pressure > 0


def crowd(llm: LLM, rng: random.Random, size: int) -> list[tuple[Ask, RequestOutput]]:
    """Let `size` requests come and go. Returns those that ended by themselves and are to be compared."""
    engine = llm.engine
    running: dict[str, Ask] = {}
    found = []
    while size or running:
        while size and len(running) < 14 and rng.random() < 0.5:
            size -= 1
            running[str(size)] = ask = draw(rng)
            engine.add_request(str(size), ask.prompt, ask.params, output_kind="final")
        if running and rng.random() < 0.03:
            engine.abort_request(rng.choice(list(running)))
        for output in engine.step():
            ask = running.pop(output.request_id)
            if ask.is_own and all(choice.finish_reason != "abort" for choice in output.outputs):
                found.append((ask, output))
    return found


def answers(output: RequestOutput) -> list[Any]:
    """All that must be the same, floats to the bit."""
    choices = [
        (c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs, c.cumulative_logprob, c.died_at)
        for c in output.outputs
    ]
    return [*choices, output.prompt_logprobs, output.error]
