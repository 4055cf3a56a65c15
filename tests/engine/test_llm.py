"""`LLM`: prompts in every form, answers in vLLM's shape, errors before anything runs, nothing left behind."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.tiny_models import BOS, EOS, save_llama
from vtoken import LLM, CapacityError, CheckpointError, ConfigError, EngineError, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), num_blocks=64, max_model_len="auto", seed=0) as llm:
        yield llm


def generate(llm, *args, **kwargs):
    outputs = llm.generate(*args, use_tqdm=False, **kwargs)
    assert llm.stats().usage.held_blocks == 0
    assert not llm.engine.has_unfinished_requests()
    return outputs


def test_outputs_have_vllms_shape(llm):
    [output] = generate(llm, "Hello", GREEDY)
    assert output.prompt == "Hello"
    assert output.prompt_token_ids == list(b"Hello")
    assert output.finished
    [choice] = output.outputs
    assert (choice.index, choice.finish_reason, len(choice.token_ids)) == (0, "length", 12)
    assert choice.text == llm.get_tokenizer().decode(choice.token_ids)
    assert output.metrics.arrival_time <= output.metrics.first_scheduled_time <= output.metrics.first_token_time
    assert output.metrics.first_token_time <= output.metrics.finished_time


def test_what_is_logged_at_start(folder, caplog):
    """One line on what is held; the kernels, one for each shape of a layer, are for debugging."""
    with caplog.at_level("DEBUG", "vtoken"), LLM(str(folder), num_blocks=64, max_model_len="auto"):
        pass
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert re.fullmatch(r"LlamaForCausalLM: weights \S+ \w+, KV pool \S+ \w+ = 64 blocks of 16 tokens, .* tokens", line)
    assert any(record.getMessage().startswith("linear 64 -> ") for record in caplog.records)


def test_every_form_of_a_prompt_is_the_same_prompt(llm):
    ids = list(b"Hello")
    [expected] = generate(llm, "Hello", GREEDY)
    for form in ("Hello", ids, np.array(ids), tuple(ids), {"prompt": "Hello"}, {"prompt_token_ids": ids}):
        [single] = generate(llm, form, GREEDY)
        [first, second] = generate(llm, [form, form], GREEDY)
        assert single.outputs == first.outputs == second.outputs == expected.outputs


def test_outputs_come_in_the_order_of_the_prompts_each_with_its_own_parameters(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (9, 2, 5)]
    outputs = generate(llm, ["abc", "d", "efghij"], params)
    assert [output.prompt for output in outputs] == ["abc", "d", "efghij"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 5]


def test_no_prompts_no_outputs(llm):
    assert generate(llm, []) == []


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (["fine", 7], None, "prompt"),
        (["fine", None], None, "prompt"),
        (["fine", ["a"]], None, "prompt"),
        (["fine", [1.5]], None, "prompt"),
        (["fine", [True]], None, "prompt"),
        (["fine", [-1]], None, "prompt"),
        (["fine", [258]], None, "prompt"),
        (["fine", [2**70]], None, "prompt"),
        (["fine", "\ud800"], None, "prompt"),
        (["fine", {}], None, "prompt"),
        (["fine", {"prompt": "a", "prompt_token_ids": [1]}], None, "prompt"),
        (["fine", {"prompt": "a", "cache_salt": 5}], None, "cache_salt"),
        (["fine", {"text": "a"}], None, "prompt"),
        (["fine", [1] * 5000], None, "prompt"),
        (b"bytes", None, "prompt"),
        (7, None, "prompt"),
        (None, None, "prompt"),
        (["fine", "fine"], [GREEDY], "sampling_params"),
        (["fine"], "greedy", "sampling_params"),
        (["fine", "x"], SamplingParams(stop_token_ids=[258]), "stop_token_ids"),
        (["fine", "x"], SamplingParams(n=400), "n"),
    ],
)
def test_a_wrong_prompt_is_refused_before_anything_runs(llm, prompts, params, field):
    before = llm.stats().scheduler.steps
    with pytest.raises(RequestError) as refusal:
        generate(llm, prompts, params)
    assert refusal.value.field == field
    assert llm.stats().scheduler.steps == before, "something ran"
    [output] = generate(llm, "next", GREEDY)
    assert output.outputs[0].finish_reason == "length"


def test_the_refusal_says_which_prompt(llm):
    with pytest.raises(RequestError, match=r"^prompt 1 of 3: prompt: "):
        generate(llm, ["a", [999], "b"])


def test_an_empty_prompt_is_the_bos_token_where_there_is_one(llm, tmp_path):
    [text, ids] = generate(llm, ["", []], GREEDY)
    assert text.prompt_token_ids == ids.prompt_token_ids == [BOS]
    save_llama(tmp_path)
    with (
        LLM(str(tmp_path), num_blocks=8, max_model_len="auto", skip_tokenizer_init=True) as without,
        pytest.raises(RequestError, match="BOS"),
    ):
        without.generate([[]], use_tqdm=False)


def test_choices_of_a_request_differ_and_the_first_is_the_lone_answer(llm):
    sampled = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=16)
    [many] = generate(llm, "Once", sampled)
    [lone] = generate(llm, "Once", sampled.replace(n=1))
    assert len({tuple(choice.token_ids) for choice in many.outputs}) == 4
    assert [choice.index for choice in many.outputs] == [0, 1, 2, 3]
    assert many.outputs[0].token_ids == lone.outputs[0].token_ids
    [again] = generate(llm, "Once", sampled)
    assert again.outputs == many.outputs


def test_without_a_seed_requests_differ_and_an_engine_seed_repeats_them(folder):
    def answers(seed):
        with LLM(str(folder), num_blocks=32, max_model_len="auto", seed=seed) as llm:
            outputs = generate(llm, ["abc", "abc"], SamplingParams(temperature=1.0, max_tokens=16))
            return [output.outputs[0].token_ids for output in outputs]

    first = answers(3)
    assert first[0] != first[1]
    assert answers(3) == first
    assert answers(4) != first
    assert answers(None) != answers(None)


def test_stop_tokens_end_a_choice_and_eos_can_be_ignored(tmp_path):
    """Teach the model nothing: read what it says greedily, and declare one of those tokens a stop or an EOS."""
    save_llama(tmp_path / "plain")
    with LLM(str(tmp_path / "plain"), num_blocks=16, max_model_len="auto", skip_tokenizer_init=True) as llm:
        [free] = generate(llm, [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=30))
        tokens = free.outputs[0].token_ids
        token = tokens[7]
        end = tokens.index(token) + 1
        stopping = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[token])
        [stopped] = generate(llm, [5, 6, 7], stopping)
        assert stopped.outputs[0].token_ids == tokens[:end]
        assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", token)
    save_llama(tmp_path / "eos", eos_token_id=[token, 257])
    with LLM(str(tmp_path / "eos"), num_blocks=16, max_model_len="auto", skip_tokenizer_init=True) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=30)
        [ended, ignored, both] = generate(
            llm, [[5, 6, 7]] * 3, [params, params.replace(ignore_eos=True), stopping.replace(ignore_eos=True)]
        )
        assert (ended.outputs[0].token_ids, ended.outputs[0].finish_reason) == (tokens[:end], "stop")
        assert (ignored.outputs[0].token_ids, ignored.outputs[0].finish_reason) == (tokens, "length")
        assert both.outputs[0].token_ids == tokens[:end]


def test_max_tokens_is_an_upper_bound(folder):
    """U24."""
    with LLM(str(folder), num_blocks=64, max_model_len=256) as llm:
        [output] = generate(llm, [[1] * 200], SamplingParams(max_tokens=4096, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 56
        assert output.outputs[0].finish_reason == "length"
        [output] = generate(llm, [[1] * 255], SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 1
        with pytest.raises(RequestError, match=r"256 .*255"):
            generate(llm, [[1] * 256])


def test_cached_tokens_are_reported_and_salts_keep_tenants_apart(folder):
    """U48, U81."""
    prompt = list(range(1, 41))
    with LLM(str(folder), num_blocks=64, max_model_len="auto") as llm:
        ask = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in ("a", "a", "b", "b")]
        outputs = [generate(llm, each, GREEDY)[0] for each in ask]
        assert [output.num_cached_tokens for output in outputs] == [0, 32, 0, 32]
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        [short] = generate(llm, [prompt[:15]], GREEDY)
        assert short.num_cached_tokens == 0


def test_a_prompt_of_whole_blocks_still_has_something_to_compute(llm):
    """U31."""
    prompt = [(7 * i) % 250 for i in range(48)]
    first, second = (generate(llm, [prompt], GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.outputs == second.outputs


def test_the_length_in_the_refusal_is_the_largest_that_works(folder):
    """U47."""
    settings = {"kv_memory": "64KiB", "skip_tokenizer_init": True}
    with pytest.raises(ConfigError) as refusal:
        LLM(str(folder), max_model_len=512, **settings)
    fits = int(re.search(r"largest length that fits is (\d+)", str(refusal.value))[1])
    with LLM(str(folder), max_model_len=fits, **settings) as llm:
        [output] = generate(llm, [[1] * 10], SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == fits - 10
        bytes_per_block = llm.stats().bytes_per_block
        assert llm.stats().usage.num_blocks == 64 * 1024 // bytes_per_block, "U25: exactly what was asked for"
    with pytest.raises(ConfigError):
        LLM(str(folder), max_model_len=fits + 16, **settings)
    with LLM(str(folder), max_model_len="auto", **settings) as llm:
        assert llm.stats().max_model_len == fits


def test_choices_that_can_never_fit_together_are_refused_with_what_fits(folder):
    """U01."""
    with LLM(str(folder), num_blocks=6, max_model_len="auto", skip_tokenizer_init=True) as llm:
        with pytest.raises(CapacityError) as refusal:
            generate(llm, [[1] * 20], SamplingParams(n=8, max_tokens=20))
        n = int(re.search(r"n=(\d+)", str(refusal.value))[1])
        [output] = generate(llm, [[1] * 20], SamplingParams(n=n, max_tokens=20, ignore_eos=True))
        assert [len(choice.token_ids) for choice in output.outputs] == [20] * n


def test_without_a_tokenizer_token_ids_work_and_text_is_refused(folder):
    with LLM(str(folder), num_blocks=8, max_model_len="auto", skip_tokenizer_init=True) as llm:
        [output] = generate(llm, [[1, 2, 3]], GREEDY)
        assert output.outputs[0].text == ""
        assert len(output.outputs[0].token_ids) == 12
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            generate(llm, "text")
        with pytest.raises(EngineError, match="tokenizer"):
            llm.get_tokenizer()


def test_what_cannot_start_says_why(folder, tmp_path):
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path))
    with pytest.raises(ConfigError, match="reference"):
        LLM(str(folder), attention_backend="quantum")
    with pytest.raises(ConfigError, match="block_size"):
        LLM(str(folder), block_size=3)
    with pytest.raises(ConfigError, match="blocksize.*block_size"):
        LLM(str(folder), blocksize=16)


def test_interrupting_leaves_nothing_behind(folder, monkeypatch):
    with LLM(str(folder), num_blocks=32, max_model_len="auto") as llm:
        execute, calls = llm.engine.executor.execute, []

        def interrupted(plan):
            calls.append(plan)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return execute(plan)

        monkeypatch.setattr(llm.engine.executor, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["abc", "defg"], GREEDY)
        assert llm.stats().usage.held_blocks == 0
        [output] = generate(llm, "next", GREEDY)
        assert len(output.outputs[0].token_ids) == 12


def test_progress_is_shown_and_can_be_silenced(llm, capsys):
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capsys.readouterr().err
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("preemption", ["swap", "auto"])
def test_swap_and_auto_start_and_answer_the_same(folder, llm, preemption):
    prompts = [[i + 1] * 40 for i in range(6)]
    expected = [output.outputs for output in generate(llm, prompts, GREEDY)]
    with LLM(
        str(folder), num_blocks=10, max_model_len="auto", preemption=preemption, swap_space="1MiB", block_size=8
    ) as small:
        assert [output.outputs for output in generate(small, prompts, GREEDY)] == expected
        assert small.stats().scheduler.preemptions > 0
        assert small.stats().free_host_blocks == small.stats().num_host_blocks > 0


def test_eos_of_the_model_is_not_part_of_the_text(llm):
    text = llm.get_tokenizer().decode([*b"abc", EOS])
    assert text == "abc"


def test_the_tokenizers_own_eos_ends_an_answer_too(tmp_path):
    """U20: declared by the tokenizer alone."""
    save_llama(tmp_path, tokenizer=True)
    with LLM(str(tmp_path), num_blocks=8, max_model_len="auto") as llm:
        assert EOS in llm.engine.scheduler.config.eos_token_ids


@pytest.mark.parametrize("tokenizer", ["~nosuchuser/x", "x" * 300, "/nowhere"])
def test_a_tokenizer_that_cannot_be_found_is_named(folder, tokenizer):
    with pytest.raises(CheckpointError, match="tokenizer"):
        LLM(str(folder), tokenizer=tokenizer, num_blocks=8, max_model_len="auto")
