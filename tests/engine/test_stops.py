"""Stop texts: found across tokens, held back until decided, cut off or not, counted as stops."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken import LLM, SamplingParams
from vtoken.base.errors import RequestError
from vtoken.engine.stops import find_stop, without_beginning_of

words = st.text("abc", min_size=1, max_size=4)


@given(st.lists(st.text("abc", max_size=3), max_size=12), st.lists(words, min_size=1, max_size=3))
def test_what_is_shown_is_never_taken_back(pieces: list[str], stops: list[str]) -> None:
    """Piece by piece: what is shown grows, holds no stop text, and ends where a plain search of the whole says."""
    text, shown, stopped = "", "", None
    for piece in pieces:
        before, text = len(text), text + piece
        found = find_stop(text, before, stops)
        if found is not None:
            stopped, text = found, text[: found[0]]
        visible = text if stopped else without_beginning_of(stops, text)
        assert visible.startswith(shown)
        assert not any(stop in visible for stop in stops)
        shown = visible
        if stopped:
            break
    whole = "".join(pieces)
    places = [whole.index(stop) for stop in stops if stop in whole]
    assert (stopped is None) == (not places)
    if stopped is not None:
        # A longer one may begin earlier, but it is completed later: the first that is complete counts.
        assert whole.startswith(shown + stopped[1])


@pytest.fixture(scope="module")
def llm(folder: Path):
    with LLM(str(folder), num_blocks=60, max_model_len=200) as llm:
        yield llm


PROMPTS = ["once upon", "the cat"]
FREE = SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)


def answers(llm: LLM, params: SamplingParams) -> list:
    return [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_an_answer_ends_at_the_text_in_whatever_tokens(llm: LLM) -> None:
    free = answers(llm, FREE)
    for number, whole in enumerate(free):
        stop = whole.text[9:14]
        assert len(stop) == 5
        for include in (False, True):
            params = FREE.replace(stop=[stop, "never said"], include_stop_str_in_output=include)
            found = answers(llm, params)[number]
            at = whole.text.index(stop)
            assert found.text == whole.text[: at + 5 * include]
            assert (found.finish_reason, found.stop_reason) == ("stop", stop)
            assert found.token_ids == whole.token_ids[: len(found.token_ids)]
            assert len(found.token_ids) < len(whole.token_ids)


def test_one_text_may_be_given_as_such(llm: LLM) -> None:
    [whole, _] = answers(llm, FREE)
    [found, _] = answers(llm, FREE.replace(stop=whole.text[4:7]))
    assert found.text == whole.text[: whole.text.index(whole.text[4:7])]


def test_min_tokens_holds_it_off(llm: LLM) -> None:
    [whole, _] = answers(llm, FREE)
    stop = whole.text[2:4]
    [found, _] = answers(llm, FREE.replace(stop=stop, min_tokens=20))
    assert len(found.token_ids) >= 20


def test_each_choice_stops_by_itself(llm: LLM) -> None:
    params = FREE.replace(n=3)
    [free] = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    stop = free.outputs[1].text[5:9]
    [found] = llm.generate(PROMPTS[:1], params.replace(stop=stop), use_tqdm=False)
    for whole, choice in zip(free.outputs, found.outputs, strict=True):
        expected = whole.text.partition(stop)[0]
        assert choice.text == expected
        assert choice.finish_reason == ("stop" if stop in whole.text else "length")
    assert llm.stats().usage.held_blocks == 0


def test_what_may_become_a_stop_text_is_held_back(llm: LLM) -> None:
    [whole, _] = answers(llm, FREE)
    stop = whole.text[8:16]
    engine, shown = llm.engine, ""
    engine.add_request("held", PROMPTS[0], FREE.replace(stop=stop))
    while engine.has_unfinished_requests():
        for output in engine.step():
            text = output.outputs[0].text
            assert text.startswith(shown), "nothing is taken back"
            assert whole.text.startswith(text)
            assert len(text) <= whole.text.index(stop)
            shown = text
    assert shown == whole.text[: whole.text.index(stop)]


@pytest.mark.parametrize("stop", ["", ["a", ""], [1], 3, [b"a"]])
def test_what_is_no_text_is_refused(stop: object) -> None:
    with pytest.raises(RequestError, match="^stop: expected a text that is not empty") as error:
        SamplingParams(stop=stop)
    assert error.value.field == "stop"


def test_without_a_tokenizer_there_is_no_text_to_stop_at(folder: Path) -> None:
    with (
        LLM(str(folder), num_blocks=20, max_model_len=64, skip_tokenizer_init=True) as llm,
        pytest.raises(RequestError, match="stop: this engine has no tokenizer .* stop_token_ids"),
    ):
        llm.generate([[1, 2, 3]], SamplingParams(stop="x"), use_tqdm=False)
