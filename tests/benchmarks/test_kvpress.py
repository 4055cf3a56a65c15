"""The comparison with kvpress: both sides keep the same number of tokens, and measure the same thing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from benchmarks.kvpress.__main__ import Records, parse
from benchmarks.kvpress.cases import Case, Found, make_cases, summary
from benchmarks.kvpress.ours import run_cases
from benchmarks.kvpress.pairs import PAIRS, Pair, compression_ratio
from benchmarks.kvpress.press import run_case
from benchmarks.kvpress.report import BEGIN, END, FULL, Line, page, write_between_markers
from tests.tiny_models import VOCAB_SIZE, save_llama
from vtoken import LLM
from vtoken.engine.text import Tokenizer
from vtoken.evals.texts import read_text
from vtoken.policies.registry import resolve_policy
from vtoken.schedule.retention import KEEPS_ALL, RetentionSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), tokenizer=True)


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[Case]:
    return make_cases(
        Tokenizer.from_folder(folder), read_text(None), context=200, windows=2, needles=1, continuation=40
    )


@pytest.fixture(scope="module")
def transformer(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class FirstAndLast:
    """A press made by hand: the first four tokens and the last ones are left in every layer."""

    def __init__(self, kept: int) -> None:
        self.kept = kept

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        def cut(module: Any, _: Any, arguments: dict[str, Any], output: Any) -> Any:
            cache = next(arguments[name] for name in ("cache", "past_key_values") if name in arguments)  # new and old
            layer = cache.layers[module.layer_idx]
            length = layer.keys.shape[2]
            places = torch.tensor([*range(4), *range(length - self.kept + 4, length)])
            layer.keys, layer.values = layer.keys[:, :, places], layer.values[:, :, places]
            return output

        hooks = [layer.self_attn.register_forward_hook(cut, with_kwargs=True) for layer in model.model.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@given(context=st.integers(2, 10_000), data=st.data())
def test_kvpress_keeps_exactly_as_many_tokens(context: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, context - 1))
    ratio = compression_ratio(context, kept)
    assert 0 < ratio < 1
    assert int(context * (1 - ratio)) == kept  # as ScorerPress rounds


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.press)
def test_every_pair_can_be_run_at_the_sizes_of_the_page(pair: Pair) -> None:
    args = parse([])
    policy = resolve_policy(pair.policy_for(args.context))
    for kept in args.kept:
        settings = RetentionSettings(policy, kept, "always", 10**6, 0, prompt_end=args.context)
        retention = settings.resolve(KEEPS_ALL, 16)
        assert retention is not None
        retention.check(args.context + 256, 16)
        assert retention.next_place(0, 0, args.context + 256) == args.context
        assert retention.next_place(args.context, kept, args.context + 256) > args.context + 256


def test_cases_are_a_context_and_what_follows_it(cases: list[Case]) -> None:
    assert [case.kind for case in cases] == ["perplexity"] * 2 + ["needle"] * 5
    text = read_text(None).content.encode()
    for i, case in enumerate(cases[:2]):
        whole = bytes(case.context + case.given + case.scored)
        assert whole == text[i * 240 : (i + 1) * 240]
        assert (len(case.context), len(case.given)) == (200, 1)
    for case in cases[2:]:
        assert len(case.context) == 200
        assert bytes(case.scored).strip().isdigit()
        assert bytes(case.scored) in bytes(case.context)
    assert Case.from_json(cases[0].to_json()) == cases[0]


def test_with_the_full_cache_both_sides_are_a_plain_forward_pass(
    folder: Path, cases: list[Case], transformer: Any
) -> None:
    with LLM(str(folder), num_blocks=400, max_model_len="auto") as llm:
        ours = run_cases(llm, cases, None, 200)
    for case, found in zip(cases, ours, strict=True):
        theirs = run_case(transformer, case.to_json(), None, 200)
        text = torch.tensor([case.context + case.given + case.scored])
        with torch.inference_mode():
            logprobs = transformer(text).logits[0].double().log_softmax(dim=1)
        begin = len(case.context) + len(case.given)
        right = float(logprobs[begin - 1 : -1].gather(1, text[0, begin:, None]).sum())
        assert theirs["logprob"] == pytest.approx(right, abs=1e-3)
        assert found.logprob == pytest.approx(right, abs=1e-3)


def test_when_the_same_tokens_are_kept_both_sides_find_the_same(
    folder: Path, cases: list[Case], transformer: Any
) -> None:
    with LLM(str(folder), num_blocks=400, max_model_len="auto") as llm:
        ours = run_cases(llm, cases, "streaming_llm", 50)
        full = run_cases(llm, cases, None, 200)
    for case, found, whole in zip(cases, ours, full, strict=True):
        theirs = run_case(transformer, case.to_json(), FirstAndLast(50), 50)
        assert found.logprob == pytest.approx(theirs["logprob"], abs=1e-3)
        assert abs(found.logprob - whole.logprob) > 0.01


def test_another_number_of_kept_tokens_is_an_error_and_not_a_figure(
    folder: Path, cases: list[Case], transformer: Any
) -> None:
    with pytest.raises(RuntimeError, match="60 tokens were to be kept, 50 were"):
        run_case(transformer, cases[0].to_json(), FirstAndLast(50), 60)
    with LLM(str(folder), num_blocks=400, max_model_len="auto") as llm, pytest.raises(RuntimeError, match="kept"):
        run_cases(llm, cases, "paged_eviction", 50)  # whole blocks only


def test_a_needle_is_found_if_each_token_of_the_answer_is_the_likeliest(folder: Path, transformer: Any) -> None:
    """The answer that each side would draw is found by both."""
    context, given = list(range(40)), [7, 8, 9]
    text = torch.tensor([context + given])
    drawn = transformer.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=5, do_sample=False)
    answer = drawn[0, 43:].tolist()
    right = Case("needle", context, given, answer)
    wrong = Case("needle", context, given, [*answer[:4], (answer[4] + 1) % VOCAB_SIZE])
    with LLM(str(folder), num_blocks=100, max_model_len="auto") as llm:
        assert [found.is_greedy for found in run_cases(llm, [right, wrong], None, 40)] == [True, False]
    assert [run_case(transformer, case.to_json(), None, 40)["is_greedy"] for case in (right, wrong)] == [True, False]


def test_a_summary_is_by_token_and_by_needle() -> None:
    cases = [
        Case("perplexity", [1], [1], [1] * 30),
        Case("perplexity", [1], [1], [1] * 10),
        Case("needle", [1], [1], [1] * 5),
        Case("needle", [1], [1], [1] * 5),
    ]
    found = [Found(-60.0, False), Found(-60.0, False), Found(-1.0, True), Found(-9.0, False)]
    assert summary(cases, found) == {"perplexity": -3.0, "needle": -1.0, "found": 0.5}


# --- the page and what is remembered ----------------------------------------------------------------------------------

ABOUT = {
    "date": "2026-11-30",
    "model": "tiny",
    "kvpress": "kvpress 1",
    "windows": 2,
    "context": 1024,
    "text": "a text",
    "continuation": 256,
    "needles": 5,
}


def line(press: str, policy: str, kept: int, theirs: float, ours: float) -> Line:
    return Line(
        press,
        policy,
        kept,
        {"perplexity": theirs, "found": 0.5, "needle": -1.0},
        {"perplexity": ours, "found": 1.0, "needle": -0.25},
    )


def test_the_page_has_a_row_a_pair_and_number_of_tokens() -> None:
    lines = [
        line("SnapKVPress", "snapkv", 128, -3.0, -4.0),
        line(FULL, FULL, 1024, -2.0, -2.0),
        line("RandomPress", "random", 256, -1.0, -1.0),
    ]
    text = page(lines, ABOUT)
    rows = [row for row in text.splitlines() if row.startswith("|")]
    assert rows[2:] == [
        "| 1,024 | full cache | 7.39 | 50% | -1.00 | full cache | 7.39 | 100% | -0.25 |",
        "| 256 | RandomPress | 2.72 | 50% | -1.00 | random | 2.72 | 100% | -0.25 |",
        "| 128 | SnapKVPress | 20.09 | 50% | -1.00 | snapkv | 54.60 | 100% | -0.25 |",
    ]
    assert "2 contexts of 1,024 tokens of a text" in text


def test_the_table_stands_between_its_markers(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"# Results\n\n{BEGIN}\nold\n{END}\n\nmore\n")
    write_between_markers(file, "new")
    assert file.read_text() == f"# Results\n\n{BEGIN}\nnew\n{END}\n\nmore\n"
    file.write_text("# Results\n")
    write_between_markers(file, "new")
    assert file.read_text() == f"# Results\n\n{BEGIN}\nnew\n{END}\n"
    file.write_text(f"{END} {BEGIN}")
    with pytest.raises(ValueError, match="needs both"):
        write_between_markers(file, "new")


def test_figures_belong_to_what_decides_them(tmp_path: Path) -> None:
    found = [Found(-1.5, True)]
    records = Records(tmp_path, {"cases": [1]})
    assert records.get("kvpress", "full cache") is None
    records.put("kvpress", "full cache", found)
    assert Records(tmp_path, {"cases": [1]}).get("kvpress", "full cache") == found
    assert Records(tmp_path, {"cases": [2]}).get("kvpress", "full cache") is None


def test_more_kept_tokens_than_there_are_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--context", "512", "--kept", "512"])
    assert "--kept: expected numbers of tokens below --context 512" in capsys.readouterr().err
