"""What an attacker found once: each of these broke the engine, or the answers of others."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from tests.engine.test_engine import answer, finish
from tests.tiny_models import save_llama
from vtoken import LLM, EngineError, RequestError, SamplingParams
from vtoken.schedule.batch import PlanBuilder

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPT = list(range(40))


@pytest.fixture
def llm(folder):
    with LLM(str(folder), num_blocks=40, max_model_len="auto", seed=1) as llm:
        yield llm


def test_an_id_may_be_used_again_right_after_its_abort(llm):
    engine = llm.engine
    expected = answer(engine, "other")
    engine.add_request("n", "neighbour", GREEDY)
    engine.add_request("a", "hello", GREEDY)
    engine.step()
    engine.abort_request("a")
    engine.add_request("a", "other", GREEDY)
    ended = [output for output in engine.step() if output.finished]
    assert [(output.request_id, output.outputs[0].finish_reason) for output in ended] == [("a", "abort")]
    last = finish(engine)
    assert last["a"].outputs[0].token_ids == expected
    assert last["n"].outputs[0].finish_reason == "length"


def test_ctrl_c_while_a_step_is_planned_leaves_no_wrong_prefix(llm, monkeypatch):
    expected = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs
    build, fresh = PlanBuilder.build, {"prompt_token_ids": PROMPT, "cache_salt": "fresh"}

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(PlanBuilder, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(fresh, GREEDY, use_tqdm=False)
    monkeypatch.setattr(PlanBuilder, "build", build)
    [again] = llm.generate(fresh, GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 0
    assert again.outputs == expected


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises, also where the tests were started in the background, where shells have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("moment", ["schedule", "execute", "apply"])
def test_a_real_ctrl_c_waits_for_the_end_of_the_step(llm, monkeypatch, moment):
    expected = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs
    owner = llm.engine.executor if moment == "execute" else llm.engine.scheduler
    method, calls = getattr(owner, moment), []

    def pressed(*args):
        calls.append(moment)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return method(*args)

    monkeypatch.setattr(owner, moment, pressed)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, [5] * 30], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    llm.engine.scheduler.check()
    assert llm.stats().usage.held_blocks == 0
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_costs_no_output_of_the_step_it_waited_for(llm, monkeypatch):
    engine, execute = llm.engine, llm.engine.executor.execute
    engine.add_request("a", "x", GREEDY.replace(max_tokens=1))

    def pressed(plan):
        os.kill(os.getpid(), signal.SIGINT)
        return execute(plan)

    monkeypatch.setattr(engine.executor, "execute", pressed)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_unfinished_requests()
    [output] = engine.step()
    assert (output.request_id, len(output.outputs[0].token_ids), output.finished) == ("a", 1, True)
    assert not engine.has_unfinished_requests()


def test_an_error_that_cannot_describe_itself_ends_one_request(llm, monkeypatch):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    execute = llm.engine.executor.execute

    def failing(plan):
        monkeypatch.setattr(llm.engine.executor, "execute", execute)
        raise Mute

    monkeypatch.setattr(llm.engine.executor, "execute", failing)
    [output] = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.error) == ("error", "Mute")
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].error is None


def test_a_tokenizer_that_fails_costs_no_other_answer(llm, monkeypatch):
    decode = llm.engine.tokenizer.decode
    [expected] = llm.generate("fine", GREEDY, use_tqdm=False)

    def failing(token_ids):
        if len(token_ids) == 7:
            raise ValueError("no such word")
        return decode(token_ids)

    monkeypatch.setattr(llm.engine.tokenizer, "decode", failing)
    bad, good = llm.generate(["bad", "fine"], [GREEDY.replace(max_tokens=7), GREEDY], use_tqdm=False)
    assert "no such word" in bad.error
    assert len(bad.outputs[0].token_ids) == 7
    assert good.outputs == expected.outputs


def test_nobody_waits_for_ever_for_an_engine_that_has_nothing_to_run(llm, monkeypatch):
    llm.engine.add_request("a", "x", GREEDY)
    monkeypatch.setattr(llm.engine.scheduler, "schedule", lambda: None)
    with pytest.raises(EngineError, match="a bug of ours"):
        llm.engine.step()


def test_a_thousand_choices_wait_with_one_prompt(folder):
    with LLM(str(folder), num_blocks=600, max_model_len=400, max_num_seqs=500, block_size=4) as llm:
        engine = llm.engine
        engine.add_request("a", [7] * 380, GREEDY.replace(n=400, max_tokens=2))
        [request] = engine.scheduler._requests.values()
        assert sum(len(sequence.token_ids) for sequence in request.sequences) == 380
        finish(engine)
        assert [len(sequence.token_ids) for sequence in request.sequences] == [382] * 400
        assert all(sequence.output_token_ids == request.sequences[0].output_token_ids for sequence in request.sequences)


def test_a_bos_token_outside_the_vocabulary_is_refused_with_the_prompt(tmp_path):
    save_llama(tmp_path)
    with LLM(str(tmp_path), num_blocks=8, max_model_len="auto", skip_tokenizer_init=True) as llm:
        object.__setattr__(llm.engine.facts, "bos_token_id", 2**31)
        llm.engine.add_request("n", PROMPT, GREEDY)
        llm.engine.step()
        with pytest.raises(RequestError, match="vocabulary"):
            llm.engine.add_request("empty", [], GREEDY)
        assert len(finish(llm.engine)["n"].outputs[0].token_ids) == 10


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (([None],), "prompt"),
        (([1, None],), "prompt"),
        ((np.array(5),), "prompt"),
        ((np.array([[1, 2]]),), "prompt"),
        ((bytearray(b"ab"),), "prompt"),
        ((iter([1, 2]),), "prompt"),
        (("x", {"n": 1}), "params"),
        (("x", SamplingParams), "params"),
    ],
)
def test_odd_arguments_are_refused_by_name(llm, arguments, field):
    with pytest.raises(RequestError) as refusal:
        llm.engine.add_request("a", *arguments)
    assert refusal.value.field == field
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"output_kind": "deltas"}, "output_kind"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": b"x"}, "cache_salt"),
    ],
)
def test_odd_options_are_refused_by_name(llm, options, field):
    with pytest.raises(RequestError) as refusal:
        llm.engine.add_request("a", "x", GREEDY, **options)
    assert refusal.value.field == field


def test_odd_lists_of_prompts_are_refused(llm):
    for prompts in ([[None]], np.array(5), [np.array(5)], bytearray(b"x"), memoryview(b"x")):
        with pytest.raises(RequestError):
            llm.generate(prompts, GREEDY, use_tqdm=False)
