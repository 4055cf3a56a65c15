"""Beam search in the whole engine: texts and scores of transformers, whatever the memory did on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import VOCAB_SIZE, save_llama
from vtoken import LLM, RequestError, SamplingParams
from vtoken.engine.outputs import RequestOutput

PROMPTS = [np.random.default_rng(i).integers(3, VOCAB_SIZE, n).tolist() for i, n in enumerate([5, 40, 17, 24])]
COMMON: dict[str, Any] = {"block_size": 4, "max_model_len": 96, "num_blocks": 400, "skip_tokenizer_init": True}
MEMORIES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "compiled": {"attention_backend": "cpu"},
    "reference": {"attention_backend": "reference"},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 24},
    "recompute": {"num_blocks": 75},
    "swap": {"num_blocks": 75, "preemption": "swap", "swap_space": "4MiB"},
}
END = 7  # a token that the tiny model says often enough


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("beams"))


def search(folder: Path, params: SamplingParams, **settings: Any) -> list[RequestOutput]:
    with LLM(str(folder), **(COMMON | settings)) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        stats = llm.stats()
        if settings.get("num_blocks") == 75:
            assert stats.scheduler.preemptions > 0
        assert stats.usage.held_blocks == 0
        llm.engine.scheduler.check()
    return outputs


def expected(folder: Path, prompt: list[int], ends: list[int], **options: Any) -> list[tuple[list[int], float]]:
    """(answer, score) of each returned beam, from transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generated = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    found = []
    for text, score in zip(generated.sequences.tolist(), generated.sequences_scores.tolist(), strict=True):
        answer = text[len(prompt) :]
        at = [i for i, token in enumerate(answer) if token in ends]
        found.append((answer[: at[0] + 1] if at else answer, score))
    return found


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize(
    ("penalty", "stopping"), [(1.0, False), (0.0, "never"), (2.0, True), (-1.0, False), (1.0, "never"), (0.5, True)]
)
def test_u40_texts_and_scores_are_those_of_transformers(
    folder: Path, width: int, penalty: float, stopping: Any
) -> None:
    """With tokens that end answers early and often, so that all ways to stop are taken."""
    ends = [END, 20, 33, 51, 64, 77]
    params = SamplingParams(
        n=width,
        use_beam_search=True,
        max_tokens=30,
        length_penalty=penalty,
        early_stopping=stopping,
        stop_token_ids=ends,
        ignore_eos=True,
    )
    lengths = set()
    for prompt, output in zip(PROMPTS, search(folder, params), strict=True):
        right = expected(
            folder,
            prompt,
            ends,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=30,
            length_penalty=penalty,
            early_stopping=stopping,
        )
        assert [choice.token_ids for choice in output.outputs] == [answer for answer, _ in right]
        for choice, (answer, score) in zip(output.outputs, right, strict=True):
            assert choice.cumulative_logprob is not None
            assert choice.cumulative_logprob / len(answer) ** penalty == pytest.approx(score, rel=1e-5, abs=1e-4)
            assert choice.finish_reason == ("stop" if answer[-1] in ends else "length")
            assert choice.stop_reason == (answer[-1] if answer[-1] in ends else None)
            lengths.add(len(answer))
    assert len(lengths) > 1


@pytest.mark.parametrize("name", MEMORIES)
def test_what_the_memory_does_changes_nothing(folder: Path, name: str) -> None:
    params = SamplingParams(n=3, best_of=5, use_beam_search=True, max_tokens=40, ignore_eos=True)
    for prompt, output in zip(PROMPTS, search(folder, params, **MEMORIES[name]), strict=True):
        right = expected(folder, prompt, [], num_beams=5, num_return_sequences=3, max_new_tokens=40)
        assert [choice.token_ids for choice in output.outputs] == [answer for answer, _ in right]
        assert [choice.index for choice in output.outputs] == [0, 1, 2]


def test_the_least_length_is_kept(folder: Path) -> None:
    ends = list(range(40, 70))
    params = SamplingParams(
        n=3,
        use_beam_search=True,
        max_tokens=12,
        min_tokens=8,
        stop_token_ids=ends,
        ignore_eos=True,
        early_stopping=True,
    )
    for prompt, output in zip(PROMPTS, search(folder, params), strict=True):
        options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 12, "min_new_tokens": 8}
        right = expected(folder, prompt, ends, early_stopping=True, **options)
        assert [choice.token_ids for choice in output.outputs] == [answer for answer, _ in right]
        assert all(len(choice.token_ids) > 8 for choice in output.outputs)


def test_u40_beams_share_their_past(folder: Path) -> None:
    """Fewer blocks than as many texts of their own, and one copied at most for a divergence."""
    params = SamplingParams(n=8, use_beam_search=True, max_tokens=40, ignore_eos=True)
    with LLM(str(folder), **COMMON) as llm:
        llm.generate(PROMPTS[1], params, use_tqdm=False)
        stats = llm.stats()
    whole = 40 // 4 + 8 * (40 // 4)
    assert stats.scheduler.peak_held_blocks < whole
    assert stats.memory.forks >= 7
    assert stats.memory.blocks_copied_on_write <= stats.memory.forks


def test_beams_among_others(folder: Path) -> None:
    alone = SamplingParams(n=4, use_beam_search=True, max_tokens=20)
    plain = SamplingParams(max_tokens=25, temperature=0.0)
    sampled = SamplingParams(n=3, max_tokens=25, temperature=1.0, seed=5, logprobs=1)
    mixed = [alone, plain, sampled, alone]
    with LLM(str(folder), **COMMON) as llm:
        together = llm.generate(PROMPTS, mixed, use_tqdm=False)
        for i, params in enumerate(mixed):
            [one] = llm.generate([PROMPTS[i]], params, use_tqdm=False)
            assert [c.token_ids for c in one.outputs] == [c.token_ids for c in together[i].outputs]


@pytest.mark.parametrize(
    "policy", ["h2o", *(pytest.param(name, marks=pytest.mark.slow) for name in ("streaming_llm", "random"))]
)
def test_beams_under_eviction_do_not_depend_on_the_memory(folder: Path, policy: str) -> None:
    eviction = {"kv_policy": policy, "kv_budget": 16, "kv_trigger": "always", "kv_stride": 8, "kv_prefill_stride": 16}
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=40, ignore_eos=True)
    settings = eviction | {"attention_backend": "reference", "max_num_seqs": 8}
    roomy = search(folder, params, **settings)
    for memory in ({"num_blocks": 40}, {"max_num_batched_tokens": 16}, {"enable_prefix_caching": False}):
        again = search(folder, params, **(settings | memory))
        assert [[c.token_ids for c in o.outputs] for o in again] == [[c.token_ids for c in o.outputs] for o in roomy]
        assert [[c.died_at for c in o.outputs] for o in again] == [[c.died_at for c in o.outputs] for o in roomy]
    assert all(choice.num_evicted > 20 for output in roomy for choice in output.outputs)


@pytest.mark.parametrize("policy", ["paged_eviction", "h2o"])
def test_beams_under_eviction_do_not_depend_on_the_company(folder: Path, policy: str) -> None:
    """Others hold the same blocks, come and go, and push beams out; which of them share a block differs every time."""
    eviction = {"kv_policy": policy, "kv_budget": 40, "kv_trigger": "always", "kv_stride": 16, "kv_prefill_stride": 32}
    beams = SamplingParams(n=2, best_of=3, use_beam_search=True, max_tokens=40, ignore_eos=True, **eviction)
    prompt = np.random.default_rng(8).integers(3, VOCAB_SIZE, 69).tolist()
    settings = COMMON | {"block_size": 8, "num_blocks": 48, "max_model_len": 256, "max_num_batched_tokens": 48}
    with LLM(str(folder), max_num_seqs=12, **settings) as llm:
        [alone] = llm.generate([prompt], beams, use_tqdm=False)
        found = []
        for seed in range(2):
            random, unsent = np.random.default_rng(seed), 30
            while unsent or llm.engine.scheduler.num_unfinished:
                if unsent and llm.engine.scheduler.num_unfinished < 14 and random.random() < 0.5:
                    unsent -= 1
                    if random.random() < 0.4:
                        llm.engine.add_request(f"beams {unsent}", prompt, beams)
                    else:
                        many, length = {"n": int(random.integers(1, 4)), "max_tokens": int(random.integers(1, 40))}, 40
                        other = prompt[:32] + random.integers(3, VOCAB_SIZE, length).tolist()
                        llm.engine.add_request(f"other {unsent}", other, SamplingParams(temperature=1.0, **many))
                found += [o for o in llm.engine.step() if o.finished and o.request_id.startswith("beams")]
        assert llm.stats().scheduler.preemptions > 0
    for output in found:
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in alone.outputs]
        assert [c.died_at for c in output.outputs] == [c.died_at for c in alone.outputs]


def test_it_can_be_ended_at_any_time(folder: Path) -> None:
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=40, ignore_eos=True)
    with LLM(str(folder), **COMMON) as llm:
        for steps in (0, 1, 2, 9):
            llm.engine.add_request("a", PROMPTS[1], params)
            outputs = [output for _ in range(steps) for output in llm.engine.step()]
            assert not outputs, "beams change until the end"
            llm.engine.abort_request("a")
            [output] = llm.engine.step()
            assert {choice.finish_reason for choice in output.outputs} == {"abort"}
            assert llm.stats().usage.held_blocks == 0
            llm.engine.scheduler.check()


def test_in_one_call(folder: Path) -> None:
    with LLM(str(folder), **COMMON) as llm:
        [output] = llm.beam_search(PROMPTS[0], 4, max_tokens=10, n=2, use_tqdm=False)
        params = SamplingParams(n=2, best_of=4, use_beam_search=True, max_tokens=10)
        [same] = llm.generate(PROMPTS[0], params, use_tqdm=False)
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in same.outputs]
        assert len(llm.beam_search(PROMPTS[0], 3, use_tqdm=False)[0].outputs) == 3
        with pytest.raises(
            RequestError, match="^use_beam_search: [0-9]+ beams are more than this model's vocabulary allows"
        ):
            llm.beam_search(PROMPTS[0], VOCAB_SIZE, use_tqdm=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 1}, "one beam is greedy search"),
        ({"n": 4, "top_k": 5, "stop": "x"}, "cannot be combined with top_k, stop"),
        ({"n": 4, "temperature": 0.7}, "cannot be combined with temperature"),
        ({"n": 4, "logprobs": 3}, "cannot be combined with logprobs"),
        ({"n": 4, "repetition_penalty": 1.1, "logit_bias": {3: 1.0}}, "with repetition_penalty, logit_bias"),
        ({"n": 4, "early_stopping": "later"}, "early_stopping: expected True, False or 'never', got 'later'"),
        ({"n": 4, "length_penalty": float("nan")}, "length_penalty: expected a number from -30 to 30"),
        ({"n": 4, "best_of": 2}, "best_of: 2 choices cannot give the n=4 best"),
    ],
)
def test_what_cannot_be_combined_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(use_beam_search=True, **settings)


def test_settings_of_a_search_have_no_effect_without_one(folder: Path) -> None:
    with pytest.raises(RequestError, match="^length_penalty: has no effect without use_beam_search"):
        SamplingParams(length_penalty=2.0)
    settings = COMMON | {"kv_policy": "expected_attention", "kv_budget": 64}
    with LLM(str(folder), **settings) as llm, pytest.raises(RequestError, match="looks back on the queries"):
        llm.beam_search(PROMPTS[0], 4, use_tqdm=False)
