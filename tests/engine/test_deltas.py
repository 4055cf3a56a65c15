"""`output_kind="delta"`: what is new and nothing else; put together it is the answer that "final" gives."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken import LLM, SamplingParams
from vtoken.engine.engine import Engine
from vtoken.engine.outputs import CompletionOutput, RequestOutput, join_deltas

FREE = SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def llm(folder: Path):
    # Every byte may come, so answers are full of cut characters.
    with LLM(str(folder), num_blocks=60, max_model_len=200, kv_policy="streaming_llm", kv_budget=64) as llm:
        yield llm


def deltas(engine: Engine, prompt: str, params: SamplingParams) -> list[RequestOutput]:
    engine.add_request("d", prompt, params, output_kind="delta")
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    return seen


def final(engine: Engine, prompt: str, params: SamplingParams) -> RequestOutput:
    engine.add_request("f", prompt, params, output_kind="final")
    while True:
        for output in engine.step():
            return output


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 3),
    length=st.integers(1, 40),
    stops=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 10),
    logprobs=st.sampled_from([None, 0, 2]),
)
def test_joined_they_are_the_final_answer(llm, seed, n, length, stops, include, min_tokens, logprobs) -> None:
    params = FREE.replace(seed=seed, n=n, max_tokens=length, min_tokens=min(length, min_tokens), logprobs=logprobs)
    whole = final(llm.engine, "once", params).outputs[-1].text
    texts = {whole[at : at + size] for at, size in stops} - {""}
    params = params.replace(stop=sorted(texts), include_stop_str_in_output=include)
    expected = final(llm.engine, "once", params)
    seen = deltas(llm.engine, "once", params)
    joined = join_deltas(seen)
    assert joined.outputs == expected.outputs
    assert (joined.finished, joined.prompt_token_ids) == (True, expected.prompt_token_ids)
    assert [delta.finished for delta in seen] == [False] * (len(seen) - 1) + [True]
    ends = defaultdict(int)
    for delta in seen:
        assert delta.outputs, "a delta says something"
        for choice in delta.outputs:
            assert not ends[choice.index], "nothing comes after the end of a choice"
            ends[choice.index] += choice.finished
            assert choice.token_ids or choice.finished
    assert ends == dict.fromkeys(range(n), 1)


def test_one_token_a_step_and_no_broken_characters_on_the_way(llm) -> None:
    only = list("Žď 你好 🏳️‍🌈".encode())
    params = FREE.replace(allowed_token_ids=sorted(set(only)), max_tokens=60)
    seen = deltas(llm.engine, "x", params)
    assert [len(delta.outputs[0].token_ids) for delta in seen] == [1] * 60
    text = "".join(delta.outputs[0].text for delta in seen)
    assert text == llm.get_tokenizer().decode([t for delta in seen for t in delta.outputs[0].token_ids])


def test_a_whole_character_comes_with_its_last_byte(llm) -> None:
    engine = llm.engine
    # Greedy, with a bias that leaves one byte: the answer is 40 times the same euro sign's last byte, never whole.
    seen = deltas(engine, "x", FREE.replace(max_tokens=5, allowed_token_ids=[0xE2]))
    pieces = [delta.outputs[0].text for delta in seen]
    assert "".join(pieces) == llm.get_tokenizer().decode([0xE2] * 5)
    assert all(set(piece) <= {REPLACEMENT} for piece in pieces)


def test_deaths_are_told_with_the_end(llm) -> None:
    params = FREE.replace(max_tokens=100, kv_trigger="always")
    expected = final(llm.engine, "once", params).outputs[0]
    seen = deltas(llm.engine, "once", params)
    assert expected.num_evicted > 0
    assert all(not delta.outputs[0].died_at for delta in seen[:-1])
    assert join_deltas(seen).outputs[0] == expected


def test_scores_of_the_prompt_come_first(llm) -> None:
    seen = deltas(llm.engine, "score this", FREE.replace(prompt_logprobs=0))
    assert len(seen[0].prompt_logprobs) == 10
    assert all(delta.prompt_logprobs is None for delta in seen[1:])
    assert join_deltas(seen).prompt_logprobs == seen[0].prompt_logprobs


def test_an_abort_ends_every_choice_that_had_not_ended(llm) -> None:
    engine = llm.engine
    engine.add_request("d", "x", FREE.replace(n=2), output_kind="delta")
    seen = engine.step() + engine.step()
    engine.abort_request("d")
    seen += engine.step()
    assert [choice.finish_reason for choice in seen[-1].outputs] == ["abort", "abort"]
    assert seen[-1].finished
    assert [len(choice.token_ids) for choice in join_deltas(seen).outputs] == [2, 2]
    assert not engine.has_unfinished_requests()


def test_a_text_that_cannot_be_made_is_said_and_costs_nobody_else(llm, monkeypatch) -> None:
    """The tokenizer fails in the middle: the tokens go on, the error is told."""
    real, calls = llm.get_tokenizer().decode_raw, []

    def failing(token_ids: list[int]) -> str:
        calls.append(1)
        if len(calls) > 8:
            raise RuntimeError("no such token")
        return real(token_ids)

    monkeypatch.setattr(llm.get_tokenizer(), "decode_raw", failing)
    seen = deltas(llm.engine, "x", FREE)
    joined = join_deltas(seen).outputs[0]
    assert len(joined.token_ids) == 40
    assert "no such token" in joined.error


def test_joining_keeps_choices_apart() -> None:
    one = RequestOutput("r", None, [1], [CompletionOutput(1, "b", [2])])
    two = RequestOutput("r", None, [1], [CompletionOutput(0, "a", [3], "stop"), CompletionOutput(1, "c", [4])])
    joined = join_deltas([one, two])
    assert [(c.index, c.text, c.token_ids, c.finish_reason) for c in joined.outputs] == [
        (0, "a", [3], "stop"),
        (1, "bc", [2, 4], None),
    ]
    assert join_deltas([one]) is one
