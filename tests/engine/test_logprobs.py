"""Log-probabilities of what is drawn: transformers' own, whatever the memory did and rules changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import VOCAB_SIZE, save_planted_llama
from vtoken import LLM, RequestError, SamplingParams
from vtoken.engine.outputs import CompletionOutput, RequestOutput

PROMPTS = [np.random.default_rng(i).integers(3, VOCAB_SIZE, n).tolist() for i, n in enumerate([40, 1, 33, 60])]
COMMON: dict[str, Any] = {"block_size": 8, "max_model_len": 128, "num_blocks": 160, "skip_tokenizer_init": True}
MEMORIES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "compiled": {"attention_backend": "cpu"},
    "reference": {"attention_backend": "reference"},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "recompute": {"num_blocks": 24},
    "swap": {"num_blocks": 24, "preemption": "swap", "swap_space": "4MiB"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_planted_llama(tmp_path_factory.mktemp("logprobs"))


def generate(folder: Path, params: SamplingParams, **settings: Any) -> list[RequestOutput]:
    with LLM(str(folder), **(COMMON | settings)) as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1), use_tqdm=False)  # so that one finds its prefix cached
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        if settings.get("num_blocks") == 24:
            assert llm.stats().scheduler.preemptions > 0
        return outputs


def expected(folder: Path, prompt: list[int], choice: CompletionOutput) -> torch.Tensor:
    """[tokens, vocab] of what was drawn, from transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + choice.token_ids])).logits[0]
    return logits[len(prompt) - 1 : -1].double().log_softmax(dim=1)


@pytest.mark.parametrize("name", MEMORIES)
def test_they_are_those_of_transformers(folder: Path, name: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, n=2, ignore_eos=True, logprobs=5, prompt_logprobs=3)
    for prompt, output in zip(PROMPTS, generate(folder, params, **MEMORIES[name]), strict=True):
        for choice in output.outputs:
            right = expected(folder, prompt, choice)
            assert choice.logprobs is not None
            assert len(choice.logprobs) == len(choice.token_ids) == 24
            total = 0.0
            for row, token, found in zip(right, choice.token_ids, choice.logprobs, strict=True):
                assert next(iter(found)) == token
                top = row.topk(5)
                assert set(found) == {token, *top.indices.tolist()}
                for other, entry in found.items():
                    assert entry.logprob == pytest.approx(float(row[other]), abs=1e-4)
                    assert entry.rank == int((row > row[other]).sum()) + 1
                    assert entry.decoded_token is None
                total += found[token].logprob
            assert choice.cumulative_logprob == pytest.approx(total)
        assert output.prompt_logprobs is not None
        assert [len(found or ()) in (0, 3, 4) for found in output.prompt_logprobs] == [True] * len(prompt)


def test_rules_and_temperature_do_not_change_them(folder: Path) -> None:
    """They say what the model thinks, not what was done to it."""
    plain = {"max_tokens": 1, "logprobs": 20, "temperature": 0.0}
    [first, *_] = generate(folder, SamplingParams(**plain))
    top = list(first.outputs[0].logprobs[0])  # type: ignore[index]
    changes: list[dict[str, Any]] = [
        {"presence_penalty": 2.0, "repetition_penalty": 1.5},
        {"logit_bias": {top[1]: 100.0}},
        {"allowed_token_ids": top[3:6]},
        {"temperature": 5.0, "seed": 1},
    ]
    for change in changes:
        [again, *_] = generate(folder, SamplingParams(**(plain | change)))
        found, before = again.outputs[0].logprobs[0], first.outputs[0].logprobs[0]  # type: ignore[index]
        assert {t: found[t].logprob for t in top} == {t: before[t].logprob for t in top}
        assert again.outputs[0].token_ids[0] in found


def test_an_evicted_answer_is_scored_by_what_was_alive(folder: Path) -> None:
    """As a prompt with the same deaths is."""
    eviction: dict[str, Any] = {
        "kv_policy": "streaming_llm",
        "kv_budget": 24,
        "kv_trigger": "always",
        "kv_stride": 8,
        "kv_prefill_stride": 16,
    }
    settings = COMMON | eviction | {"attention_backend": "reference", "block_size": 4}
    with LLM(str(folder), **settings) as llm:
        drawn = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0)
        [output] = llm.generate([PROMPTS[0]], drawn, use_tqdm=False)
        [choice] = output.outputs
        assert choice.num_evicted > 30
        known = SamplingParams(max_tokens=1, prompt_logprobs=0, kv_prompt_end=len(PROMPTS[0]))
        [again] = llm.generate([PROMPTS[0] + choice.token_ids], known, use_tqdm=False)
    assert choice.logprobs is not None
    assert again.prompt_logprobs is not None
    for token, one, other in zip(choice.token_ids, choice.logprobs, again.prompt_logprobs[40:], strict=True):
        assert other is not None
        assert one[token] == other[token]


def test_who_does_not_ask_gets_none_beside_those_who_do(folder: Path) -> None:
    params = [SamplingParams(max_tokens=4, logprobs=wanted) for wanted in (None, 0, 3, None)]
    with LLM(str(folder), **COMMON) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        with pytest.raises(RequestError, match="^logprobs: 21 is more than this engine's max_logprobs=20"):
            llm.generate(PROMPTS[:1], SamplingParams(logprobs=21), use_tqdm=False)
        with pytest.raises(RequestError, match="^prompt_logprobs: 1000000 is more than"):
            llm.generate(PROMPTS[:1], SamplingParams(prompt_logprobs=1_000_000), use_tqdm=False)
    found = [output.outputs[0].logprobs for output in outputs]
    assert found[0] is None
    assert found[3] is None
    assert all(len(each) == 1 for each in found[1] or [])
    assert all(len(each) in (3, 4) for each in found[2] or [])
    assert outputs[0].outputs[0].cumulative_logprob is None


def test_steps_tell_them_as_they_come(folder: Path) -> None:
    with LLM(str(folder), **COMMON) as llm:
        engine = llm.engine
        engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=5, logprobs=1, ignore_eos=True))
        seen = []
        while engine.has_unfinished_requests():
            [output] = engine.step()
            seen.append(output.outputs[0].logprobs)
    assert [len(each or []) for each in seen] == [1, 2, 3, 4, 5]
    assert all(one == (seen[-1] or [])[: len(one or [])] for one in seen)


# --- the best of many -------------------------------------------------------------------------------------------------


def mean(choice: CompletionOutput) -> float:
    assert choice.cumulative_logprob is not None
    return choice.cumulative_logprob / len(choice.token_ids)


@pytest.mark.parametrize("name", ["roomy", "recompute"])
def test_the_best_are_returned_best_first(folder: Path, name: str) -> None:
    every = SamplingParams(n=5, max_tokens=12, temperature=1.5, seed=7, logprobs=0)
    drawn = generate(folder, every, **MEMORIES[name])
    best = generate(folder, every.replace(n=2, best_of=5, logprobs=None), **MEMORIES[name])
    for all_of_them, some in zip(drawn, best, strict=True):
        ranked = sorted(all_of_them.outputs, key=mean, reverse=True)
        assert [choice.token_ids for choice in some.outputs] == [choice.token_ids for choice in ranked[:2]]
        assert [choice.index for choice in some.outputs] == [0, 1]
        assert [mean(choice) for choice in some.outputs] == [mean(choice) for choice in ranked[:2]]
        assert some.outputs[0].logprobs is None


def test_the_best_are_known_in_the_end_only(folder: Path) -> None:
    with LLM(str(folder), **COMMON) as llm:
        llm.engine.add_request("a", PROMPTS[0], SamplingParams(n=1, best_of=3, max_tokens=5))
        outputs = []
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
        assert [output.finished for output in outputs] == [True]
        assert len(outputs[0].outputs) == 1


def test_fewer_than_are_returned_cannot_be_drawn() -> None:
    with pytest.raises(RequestError, match="^best_of: 2 choices cannot give the n=3 best of them"):
        SamplingParams(n=3, best_of=2)
