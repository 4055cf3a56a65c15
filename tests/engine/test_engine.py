"""`Engine`: steps, aborts in every state, and errors that stay with the request they belong to."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import save_llama
from vtoken import LLM, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture
def engine(folder):
    with LLM(str(folder), num_blocks=24, max_model_len="auto", max_num_batched_tokens=32, max_num_seqs=8) as llm:
        yield llm.engine


def finish(engine):
    """Run to the end: the last output of each request."""
    last = {}
    for _ in range(10_000):
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            last[output.request_id] = output
        engine.scheduler.check()
    assert engine.stats().usage.held_blocks == 0
    return last


def answer(engine, prompt):
    engine.add_request("reference answer", prompt, GREEDY)
    return finish(engine)["reference answer"].outputs[0].token_ids


def test_outputs_grow_step_by_step_to_the_final_text(engine):
    engine.add_request("a", "Tell me", GREEDY)
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    assert [len(output.outputs[0].token_ids) for output in seen] == list(range(1, 11))
    assert [output.finished for output in seen] == [False] * 9 + [True]
    final = seen[-1].outputs[0]
    for output in seen:
        assert final.token_ids[: len(output.outputs[0].token_ids)] == output.outputs[0].token_ids
        assert final.text.startswith(output.outputs[0].text)
    assert final.text == engine.tokenizer.decode(final.token_ids)


def test_final_only_requests_are_silent_until_they_end(engine):
    engine.add_request("a", "x", GREEDY, output_kind="final")
    seen = [engine.step() for _ in range(10)]
    assert [len(outputs) for outputs in seen] == [0] * 9 + [1]


def test_stepping_an_idle_engine_does_nothing(engine):
    assert engine.step() == []
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 9])
def test_abort_in_every_state_gives_everything_back(engine, steps):
    """U02, U21: waiting, in the middle of a long prompt, decoding; others go on as if alone."""
    expected = answer(engine, [3] * 20)
    for i in range(6):
        engine.add_request(f"gone {i}", [i + 1] * 90, GREEDY.replace(n=1 + i % 2))
    engine.add_request("stays", [3] * 20, GREEDY)
    for _ in range(steps):
        engine.step()
    engine.abort_request([f"gone {i}" for i in range(6)] + ["unknown", "gone 0", ""])
    last = finish(engine)
    assert last["stays"].outputs[0].token_ids == expected
    for i in range(6):
        assert last[f"gone {i}"].finished
        assert {choice.finish_reason for choice in last[f"gone {i}"].outputs} == {"abort"}


def test_ids_are_unique_while_in_use_and_free_afterwards(engine):
    engine.add_request("a", "x", GREEDY)
    with pytest.raises(RequestError) as refusal:
        engine.add_request("a", "y", GREEDY)
    assert refusal.value.field == "request_id"
    finish(engine)
    engine.abort_request("a")
    engine.add_request("a", "y", GREEDY)
    assert len(finish(engine)["a"].outputs[0].token_ids) == 10
    for wrong in ("", 5, None):
        with pytest.raises(RequestError):
            engine.add_request(wrong, "x")


def test_a_step_that_fails_takes_only_the_request_at_fault(engine, monkeypatch):
    prompts = {f"r{i}": [10 + i] * (5 + 9 * i) for i in range(5)}
    expected = {name: answer(engine, prompt) for name, prompt in prompts.items()}
    execute = engine.executor.execute

    def failing(plan):
        if 12 in plan.token_ids:  # r2 alone has this token in its prompt
            raise RuntimeError("no luck")
        return execute(plan)

    monkeypatch.setattr(engine.executor, "execute", failing)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY, cache_salt="fresh")  # so that r2's prompt is computed again
    last = finish(engine)
    assert last["r2"].outputs[0].finish_reason == "error"
    assert "no luck" in last["r2"].error
    for name in prompts.keys() - {"r2"}:
        assert last[name].outputs[0].token_ids == expected[name]
        assert last[name].error is None
    monkeypatch.undo()
    assert answer(engine, prompts["r2"]) == expected["r2"]


@pytest.mark.parametrize(
    "part",
    ["_take_tokens", "_advance_beams", "_finish_sequence", "_end", "_end_aborted", "_residents.close", "_state.close"],
)
def test_what_a_step_brought_cannot_be_entered(engine, monkeypatch, caplog, part):
    """A bug of ours, somewhere in the middle: those of the step end, who waited goes on, and so does the engine."""
    expected = {name: answer(engine, name) for name in ("late", "after")}
    beams = SamplingParams(n=3, use_beam_search=True, max_tokens=10)
    asked = [(f"r{i}", [10 + i] * (5 + 9 * i), beams if i == 2 else GREEDY) for i in range(3)]
    for request in asked:
        engine.add_request(*request, output_kind="final")
    entered, calls = attrgetter(part)(engine.scheduler), []
    owner, _, name = f"scheduler.{part}".rpartition(".")

    def breaks(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("no luck")
        return entered(*args)

    monkeypatch.setattr(attrgetter(owner)(engine), name, breaks)
    outputs = []
    while len(calls) < 3:
        outputs += engine.step()
    assert engine.scheduler.num_unfinished == 0
    engine.scheduler.check()
    engine.add_request("late", "late", GREEDY, output_kind="final")
    last = {output.request_id: output for output in outputs} | finish(engine)
    assert last["late"].outputs[0].token_ids == expected["late"]
    broken = [last[name] for name, *_ in asked if last[name].error]
    assert broken
    assert all("a bug of vtoken: RuntimeError: no luck" in output.error for output in broken)
    assert all(choice.finish_reason == "error" for output in broken for choice in output.outputs)
    assert answer(engine, "after") == expected["after"]
    assert "could not be entered" in caplog.text


def test_nan_ends_one_request_and_is_not_cached(tmp_path):
    """U77: a token whose embedding overflows."""
    save_llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.inf
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with LLM(str(tmp_path), num_blocks=32, max_model_len="auto", skip_tokenizer_init=True) as llm:
        engine = llm.engine
        clean, broken = [1] * 40, [2] * 20 + [7] + [2] * 20
        expected = answer(engine, clean)
        engine.add_request("clean", clean, GREEDY)
        engine.add_request("broken", broken, GREEDY.replace(n=3))
        last = finish(engine)
        assert last["clean"].outputs[0].token_ids == expected
        assert {choice.finish_reason for choice in last["broken"].outputs} == {"error"}
        assert "finite" in last["broken"].error or "NaN" in last["broken"].error
        cached = torch.tensor(engine.scheduler.memory.prefix.cached_blocks)
        assert len(cached)
        assert all(torch.isfinite(cache[cached]).all() for cache in engine.executor.store.tensors)
        assert answer(engine, clean) == expected


def test_stats_tell_what_the_memory_did(engine):
    engine.add_request("a", [5] * 50, GREEDY)
    engine.add_request("b", [5] * 50, GREEDY.replace(n=2, temperature=1.0))
    finish(engine)
    stats = engine.stats()
    assert stats.scheduler.tokens_generated == 30
    assert stats.memory.prefix_hit_tokens > 0
    assert 0 < stats.prefix_hit_rate < 1
    assert stats.memory.forks == 1
    assert stats.memory.blocks_copied_on_write == 1
    assert stats.kv_bytes == stats.usage.num_blocks * stats.bytes_per_block
    assert stats.tokens_per_second > 0
    assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (0, 0, 0)
    usage = stats.usage
    assert usage.free_blocks + usage.held_blocks + usage.cached_blocks + usage.pinned_blocks == usage.num_blocks
