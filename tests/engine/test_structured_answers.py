"""Structured output in the whole engine: every answer has its form, whatever the memory does and whoever is beside."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.tiny_models import EOS, save_llama
from tests.tiny_tokenizers import byte_fallback, byte_level, save
from vtoken import LLM, AsyncLLM, SamplingParams
from vtoken.base.errors import RequestError
from vtoken.engine.outputs import RequestOutput

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", 'c"d']}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"json": PERSON, "disable_any_whitespace": True},
    "recursive schema as text": {"json": json.dumps(TREE), "whitespace_pattern": " ?"},
    "object": {"json_object": True, "disable_any_whitespace": True},
    "regex": {"regex": r"\([0-9]{3}\) [a-f]{2,4}(-[^a-z0-9]{1,3})?"},
    "choice": {"choice": ["yes", "yes, of course", "ne, děkuji", "不", '👩\u200d🚀 "go"']},
    "gbnf": {"grammar": 'root ::= "a" pair\npair ::= "(" pair? ")"'},
    "lark": {"grammar": 'start: "x" (NUMBER ",")* NUMBER\nNUMBER: /[0-9]{1,4}/'},
}


def has_form(name: str, text: str) -> bool:
    if name in ("schema", "recursive schema as text", "object"):
        schema = {"schema": PERSON, "object": {"type": "object"}}.get(name, TREE)
        jsonschema.validate(json.loads(text), schema)
        return True
    if name == "regex":
        return re.fullmatch(FORMS[name]["regex"], text) is not None
    if name == "choice":
        return text in FORMS[name]["choice"]
    if name == "lark":
        return re.fullmatch(r"x([0-9]{1,4},)*[0-9]{1,4}", text) is not None
    half = (len(text) - 1) // 2
    return half > 0 and text == "a" + "(" * half + ")" * half


TIGHT = 48
MEMORIES: list[dict[str, Any]] = [
    {},
    {"num_blocks": TIGHT},
    {"num_blocks": TIGHT, "preemption": "swap", "swap_space": "1MiB"},
    {"max_num_batched_tokens": 13, "max_num_seqs": 12},
    {"attention_backend": "reference"},
]
PLAIN = SamplingParams(max_tokens=24, seed=5, temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with more ids than their tokenizers, of three kinds."""
    found = {}
    for name, tokenizer in {"byte level": byte_level(), "byte fallback": byte_fallback()}.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        save_llama(folder, vocab_size=len(tokenizer) + 37, eos_token_id=tokenizer.eos_token_id)
        found[name] = save(tokenizer, folder)
    found["one token a byte, no end token"] = save_llama(tmp_path_factory.mktemp("bytes"), tokenizer=True)
    return found


def run(folder: Path, params: list[SamplingParams], **settings: Any) -> list[RequestOutput]:
    common = {"num_blocks": 200, "block_size": 8, "max_model_len": 160}
    prompts = [f"the quick brown fox {'jumps ' * (i % 3)}" for i in range(len(params))]
    with LLM(str(folder), **(common | settings)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if settings.get("num_blocks") == TIGHT:
            assert llm.stats().scheduler.preemptions > 0, "the memory was too small for all at once"
        llm.engine.scheduler.check()
        return outputs


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [[(choice.token_ids, choice.text, choice.finish_reason) for choice in each.outputs] for each in outputs]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "one token a byte, no end token"])
def test_every_answer_has_its_form_and_neighbours_do_not_notice(folders: dict[str, Path], kind: str) -> None:
    free = answers(run(folders[kind], [PLAIN] * (2 * len(FORMS))))
    params = []
    for seed, form in enumerate(FORMS.values()):
        params += [SamplingParams(max_tokens=90, seed=seed, n=3, structured_outputs=form), PLAIN]
    expected = run(folders[kind], params)
    num_complete = 0
    for name, output in zip(FORMS, expected[::2], strict=True):
        assert output.error is None
        assert len({choice.text for choice in output.outputs}) > 1 or name == "choice", "choices are drawn apart"
        for choice in output.outputs:
            if choice.finish_reason == "stop":
                assert has_form(name, choice.text), choice.text
                num_complete += 1
            else:
                assert (choice.finish_reason, len(choice.token_ids)) == ("length", 90)
    assert num_complete >= 2 * len(FORMS)
    assert answers(expected)[1::2] == free[1::2]
    for settings in MEMORIES:
        assert answers(run(folders[kind], params, **settings)) == answers(expected), settings


def test_under_eviction_too(folders: dict[str, Path]) -> None:
    """What is dead was said all the same; and what dies at fixed places does not depend on the memory."""
    eviction = {"kv_policy": "streaming_llm", "kv_budget": 16, "kv_stride": 8, "kv_trigger": "always"}
    params = [
        SamplingParams(max_tokens=90, seed=seed, n=2, structured_outputs=form, **eviction)
        for seed, form in enumerate(FORMS.values())
    ]
    roomy = run(folders["byte level"], params)
    assert sum(choice.num_evicted for output in roomy for choice in output.outputs) > 20
    for name, output in zip(FORMS, roomy, strict=True):
        for choice in output.outputs:
            assert choice.finish_reason == "length" or has_form(name, choice.text)
    assert answers(run(folders["byte level"], params, num_blocks=20)) == answers(roomy)


def test_a_step_that_failed_never_was(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(max_tokens=60, seed=i, structured_outputs=FORMS["schema"]) for i in range(3)]
    expected = answers(run(folders["byte level"], params))
    with LLM(str(folders["byte level"]), num_blocks=200, block_size=8, max_model_len=160) as llm:
        execute, num_steps = llm.engine.executor.execute, 0

        def fails_now_and_then(plan: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            result = execute(plan)
            if num_steps in (3, 9) and len(plan.lanes) > 1:
                raise RuntimeError("the result is lost")
            return result

        monkeypatch.setattr(llm.engine.executor, "execute", fails_now_and_then)
        prompts = [f"the quick brown fox {'jumps ' * (i % 3)}" for i in range(3)]
        assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected
        assert llm.stats().scheduler.failed_steps > 0


def test_how_an_answer_ends(folders: dict[str, Path]) -> None:
    def ends(kind: str, **params: Any) -> tuple[str, str | None, int]:
        [output] = run(folders[kind], [SamplingParams(seed=1, **params)])
        assert output.error is None
        [choice] = output.outputs
        return choice.text, choice.finish_reason, len(choice.token_ids)

    for kind in folders:
        # Nothing can follow, so no end token is waited for; and that is no matter of length.
        text, reason, length = ends(kind, structured_outputs={"regex": "[xs]{5}"}, max_tokens=5)
        assert (len(text), reason) == (5, "stop")
        assert length <= 5
        text, reason, _ = ends(kind, structured_outputs={"regex": "[xs]{50}"}, max_tokens=7)
        assert (set(text) <= set("xs"), reason) == (True, "length")
        # A stop text cuts what has the form.
        text, reason, _ = ends(kind, structured_outputs={"regex": "a=[xs]{3};b"}, stop=";")
        assert (re.fullmatch("a=[xs]{3}", text) is not None, reason) == (True, "stop")
        # An end that is too early is not drawn.
        text, reason, length = ends(kind, structured_outputs={"regex": "[xs]*"}, min_tokens=6, max_tokens=30)
        assert length >= 6


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"allowed_token_ids": [EOS]}, "structured_outputs and allowed_token_ids"),
        ({"min_tokens": 9}, "structured_outputs and min_tokens=9"),
        ({"bad_words": ["s", "x"]}, "structured_outputs and bad_words"),
        ({"logits_processors": [lambda answer, row: row.fill_(float("-inf"))]}, "structured_outputs and logits_proc"),
    ],
)
def test_a_contradiction_ends_its_own_request_and_names_both(
    folders: dict[str, Path], params: dict[str, Any], names: str
) -> None:
    form = {"structured_outputs": {"regex": "[sx]{3}"}}
    for backend in ("auto", "reference"):
        bad, good = run(
            folders["one token a byte, no end token"],
            [SamplingParams(**form, **params), SamplingParams(**form)],
            attention_backend=backend,
        )
        assert (bad.error or "").startswith(f"{names}")
        assert "ruled out every token: none is left to draw" in (bad.error or "")
        assert (good.error, good.outputs[0].finish_reason) == (None, "stop")


def test_no_function_of_a_request_gets_round_its_form(folders: dict[str, Path]) -> None:
    params = SamplingParams(
        structured_outputs={"regex": "[a-z]{8}"}, logits_processors=[lambda answer, row: row * 0], temperature=0.0
    )
    [output] = run(folders["byte level"], [params])
    assert re.fullmatch("[a-z]{8}", output.outputs[0].text)


def test_what_is_refused_leaves_nothing_behind(folders: dict[str, Path]) -> None:
    with LLM(str(folders["byte level"]), num_blocks=40, max_model_len=100) as llm:
        for params in (
            {"structured_outputs": {"regex": "["}},
            {"structured_outputs": {"regex": "a"}, "ignore_eos": 1 > 0},
        ):
            with pytest.raises(RequestError, match="structured_outputs: ") as caught:
                llm.engine.add_request("r", "the", SamplingParams(**params))
            assert caught.value.field == "structured_outputs"
        assert not llm.engine.has_unfinished_requests()
    with LLM(str(folders["byte level"]), num_blocks=40, max_model_len=100, skip_tokenizer_init=True) as llm:
        for field, value in (("structured_outputs", {"regex": "a"}), ("bad_words", ["a"])):
            with pytest.raises(RequestError, match=f"{field}: this engine has no tokenizer") as caught:
                llm.engine.add_request("r", [1, 2], SamplingParams(**{field: value}))
            assert caught.value.field == field


def test_served_to_many_at_once(folders: dict[str, Path]) -> None:
    """Compiled in the pool's threads, followed in the engine's."""
    params = [SamplingParams(max_tokens=90, seed=i, structured_outputs=form) for i, form in enumerate(FORMS.values())]
    expected = answers(run(folders["byte level"], params))
    prompts = [f"the quick brown fox {'jumps ' * (i % 3)}" for i in range(len(params))]

    async def everybody() -> list[Any]:
        async with AsyncLLM(str(folders["byte level"]), num_blocks=200, block_size=8, max_model_len=160) as llm:

            async def one(prompt: str, params: SamplingParams) -> list[RequestOutput]:
                return [output async for output in llm.generate(prompt, params, output_kind="delta")]

            with pytest.raises(RequestError, match="structured_outputs: regex: wrong expression"):
                await one("the", SamplingParams(structured_outputs={"regex": "["}))
            return await asyncio.gather(*map(one, prompts, params))

    for deltas, [[tokens, text, reason]] in zip(asyncio.run(everybody()), expected, strict=True):
        assert "".join(output.outputs[0].text for output in deltas) == text
        assert [token for output in deltas for token in output.outputs[0].token_ids] == tokens
        assert deltas[-1].outputs[0].finish_reason == reason


def test_beside_scores_and_the_best_of_several(folders: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=60, seed=3, n=2, best_of=5, logprobs=2, structured_outputs=FORMS["regex"])
    for settings in ({}, {"num_blocks": TIGHT}):
        outputs = run(folders["byte level"], [params.replace(seed=seed) for seed in range(6)], **settings)
        for choice in (choice for output in outputs for choice in output.outputs):
            assert choice.finish_reason == "stop"
            assert has_form("regex", choice.text)
            assert choice.logprobs is not None
            assert len(choice.logprobs) == len(choice.token_ids)


@pytest.mark.parametrize(
    "params",
    [{"structured_outputs": {"regex": "a"}}, {"bad_words": ["a"]}, {"logits_processors": [lambda answer, row: row]}],
)
def test_not_in_a_search(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"use_beam_search: cannot be combined with {next(iter(params))}"):
        SamplingParams(use_beam_search=True, n=3, temperature=0.0, **params)
