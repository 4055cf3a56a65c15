"""Grammars: masks against a plain oracle, states that follow from the tokens alone, errors in the user's words."""

from __future__ import annotations

import json
from threading import Thread
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_tokenizers import byte_fallback, byte_level, byte_level_of
from vtoken import SamplingParams
from vtoken.base.errors import RequestError
from vtoken.engine.structured import MAX_CACHED, GrammarConstraint, Grammars
from vtoken.engine.text import Tokenizer
from vtoken.memory import bits

PAD = 45  # ids that the model has and the tokenizer has not
TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


def grammars(name: str, eos: tuple[int, ...] | None = None) -> Grammars:
    backend = TOKENIZERS[name]
    ends = (backend.eos_token_id,) if eos is None else eos
    return Grammars(Tokenizer(backend, len(backend) + PAD), len(backend) + PAD, ends)


ALL = {name: grammars(name) for name in TOKENIZERS}


def at_start(name: str, **params: Any) -> GrammarConstraint:
    found = ALL[name].constraint(SamplingParams(**params))
    assert found is not None
    return found


def allowed(constraint: GrammarConstraint) -> list[int]:
    words = np.full(constraint.num_words, 0xDEADBEEF, np.uint32)  # whatever was there before
    constraint.fill(words)
    return np.flatnonzero(bits.unpack(words[None, None], 32 * len(words)).ravel()).tolist()


# Regular expressions over letters that the tiny vocabularies have merged and single tokens for.
pieces = st.one_of(
    st.sampled_from(["the", "fox", "s", "e", "a", " ", "[a-f]", "[^a-y]", ".", "[0-9]", "好", "(ab|ba|x)"]),
    st.text("aesx", min_size=1, max_size=3),
)
repeated = st.tuples(pieces, st.sampled_from(["", "", "?", "*", "{1,2}", "+"])).map(
    lambda both: f"(?:{both[0]}){both[1]}" if both[1] else both[0]
)
expressions = st.lists(st.lists(repeated, min_size=1, max_size=4).map("".join), min_size=1, max_size=2).map("|".join)


A = TOKENIZERS["byte fallback"].convert_tokens_to_ids("a")


def texts_of(tokenizer: Tokenizer, answer: list[int]) -> dict[int, str]:
    """Token -> the answer's text with it, for all that make whole characters."""
    texts = {token: tokenizer.decode([*answer, token]) for token in range(len(tokenizer.backend))}
    return {token: text for token, text in texts.items() if tokenizer.is_audible(token) and "\ufffd" not in text}


def fits(name: str, pattern: Any, tokenizer: Tokenizer, answer: list[int], going_on: tuple[int, str]) -> bool:
    """Whether a text is the beginning of one that matches, and no shorter than what its tokens say."""
    token, text = going_on
    is_cut = name == "byte fallback" and not answer and tokenizer.decode_raw([A, token])[1:].startswith(" ")
    return pattern.fullmatch(text, partial=True) is not None and text != tokenizer.decode(answer) and not is_cut


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40)  # each tries every token at every place
@given(expression=expressions, choose=st.randoms(use_true_random=False))
def test_a_mask_holds_just_the_tokens_that_a_text_can_go_on_with(name: str, expression: str, choose: Any) -> None:
    """Every token of the vocabulary is tried by the `regex` module, which can match beginnings."""
    tokenizer, end = Tokenizer(TOKENIZERS[name]), TOKENIZERS[name].eos_token_id
    pattern, answer = regex.compile(expression), []
    try:
        constraint = at_start(name, structured_outputs={"regex": expression})
    except RequestError:
        assert not any(fits(name, pattern, tokenizer, [], text) for text in texts_of(tokenizer, []).items())
        return
    for _ in range(6):
        found, texts = set(allowed(constraint)), texts_of(tokenizer, answer)
        is_forced = bool(constraint._matcher.compute_ff_bytes())
        assert not any(token >= len(tokenizer.backend) for token in found), "padding has no text"
        assert (end in found) == (pattern.fullmatch(tokenizer.decode(answer)) is not None)
        fitting = {token for token, text in texts.items() if fits(name, pattern, tokenizer, answer, (token, text))}
        if is_forced:  # one text alone can follow: then it is spelled as the tokenizer would
            assert found & texts.keys() <= fitting
            assert found
        else:
            assert found & texts.keys() == fitting
        assert constraint.is_over == (found == {end})
        going_on = sorted(found & fitting)
        if not going_on:
            break
        answer.append(choose.choice(going_on))
        constraint.follow(list(answer))
    assert constraint.error is None


@given(
    st.lists(st.tuples(st.integers(0, 30), st.randoms(use_true_random=False)), min_size=1, max_size=8),
    st.sampled_from(
        [{"regex": r"([a-z]+ ){1,3}\d*"}, {"json_object": True}, {"grammar": 'start: "a" start "b" | "x"'}]
    ),
)
def test_a_rewritten_answer_is_followed_as_if_it_had_always_been_so(
    steps: list[tuple[int, Any]], form: dict[str, Any]
) -> None:
    """What a beam search does: an answer is cut anywhere and goes on otherwise; copies go their own ways."""
    constraint, answer = at_start("byte level", structured_outputs=form), []
    others: list[tuple[GrammarConstraint, list[int]]] = []
    for keep, choose in steps:
        answer = answer[:keep]
        constraint.follow(answer)
        for _ in range(choose.randrange(6)):
            going_on = [token for token in allowed(constraint) if token != 0]
            if not going_on:
                break
            answer = [*answer, choose.choice(going_on)]
            constraint.follow(answer)
        others.append((constraint.copy(), answer))
        fresh = at_start("byte level", structured_outputs=form)
        fresh.follow(answer)
        assert allowed(fresh) == allowed(constraint)
        assert fresh.is_over == constraint.is_over
    for other, text in others:
        fresh = at_start("byte level", structured_outputs=form)
        fresh.follow(text)
        assert allowed(other) == allowed(fresh)


def test_a_token_that_does_not_fit_is_an_error_until_the_answer_is_another() -> None:
    constraint = at_start("byte level", structured_outputs={"regex": "ab"})
    [a], [b] = (TOKENIZERS["byte level"].encode(letter) for letter in "ab")
    constraint.follow([b])
    assert constraint.error
    assert allowed(constraint) == []
    assert not constraint.is_over
    constraint.follow([a])
    assert constraint.error is None
    assert allowed(constraint) == [b]


def test_where_an_answer_may_end() -> None:
    own = grammars("byte level", eos=(0, 7))
    [a] = TOKENIZERS["byte level"].encode("a")
    for form, at_once in (({"regex": "a?"}, True), ({"regex": "a"}, False)):
        constraint = own.constraint(SamplingParams(structured_outputs=form))
        assert constraint is not None
        assert allowed(constraint) == sorted({a} | ({0, 7} if at_once else set()))
        assert not constraint.is_over
        constraint.follow([a])
        assert allowed(constraint) == [0, 7]
        assert constraint.is_over


def test_many_choices_are_followed_to_their_end() -> None:
    """More than the rules that a parser of llguidance follows at once."""
    texts = [f"{i} the fox" for i in range(10_000)]
    constraint = at_start("byte level", structured_outputs={"choice": texts})
    for text in (texts[0], texts[-1]):
        constraint.follow(TOKENIZERS["byte level"].encode(text))
        assert constraint.error is None
        assert constraint.is_over


@pytest.mark.parametrize(
    "text", ["a", "ab", "n\u00e9", '"\\"', "\\u00e9", "\n", "\0", "\x7f", "😀", "/a/", " ", "<end>", "a|b", "#{*}"]
)
def test_a_choice_is_taken_letter_by_letter(text: str) -> None:
    """Whatever its letters mean in grammars and expressions."""
    texts = [
        "a",
        "ab",
        "n\u00e9",
        '"\\"',
        "\\u00e9",
        "\n",
        "\0",
        "\x7f",
        "😀",
        "/a/",
        " ",
        "<end>",
        "a|b",
        "#{*}",
        "aa",
    ]
    constraint = at_start("byte level", structured_outputs={"choice": texts})
    tokens = TOKENIZERS["byte level"].encode(text, split_special_tokens=True)
    for place, token in enumerate(tokens):
        assert token in allowed(constraint)
        constraint.follow(tokens[: place + 1])
    assert 0 in allowed(constraint), "it may end"
    assert constraint.is_over == (text != "a"), "which goes on as ab, aa and a|b"


def test_stop_tokens_without_text_are_ends_and_others_are_text() -> None:
    [a] = TOKENIZERS["byte level"].encode("a")
    padding = len(TOKENIZERS["byte level"]) + 3
    constraint = at_start("byte level", structured_outputs={"regex": "aa"}, stop_token_ids=[padding, a])
    assert allowed(constraint) == [a], "no end before the form is complete"
    constraint.follow([a, a])
    assert allowed(constraint) == [0, padding]


def test_a_model_without_end_tokens_can_be_constrained() -> None:
    own = grammars("byte level", eos=())
    constraint = own.constraint(SamplingParams(structured_outputs={"regex": "a{2}"}))
    assert constraint is not None
    [a] = TOKENIZERS["byte level"].encode("a")
    constraint.follow([a, a])
    assert constraint.is_over
    assert allowed(constraint) == []


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "[a-"}, "regex: .*unclosed character class"),
        ({"regex": "(?=x)a"}, "regex: .*look-around.* is not supported"),
        ({"regex": r"(a)\1"}, "regex: .*backreferences are not supported"),
        ({"json": {"enum": ["\ud800"]}}, "json: .*not JSON serializable"),
        ({"json": {"type": "strin"}}, "json: Invalid type: strin"),
        ({"json": {"type": "array", "uniqueItems": True}}, 'json: Unimplemented keys: ."uniqueItems"'),
        ({"json": {"not": {}}}, "json: Unimplemented keys"),
        ({"json": {"$ref": "#/nowhere"}}, "json: Pointer '/nowhere' does not exist"),
        ({"json": "false"}, "json: Unsatisfiable schema"),
        ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "json: Unsatisfiable schema"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "json: Unsatisfiable"),
        ({"json": {"type": "string", "pattern": "(?=a)"}}, "json: .*look-around"),
        ({"json": {"type": "string", "format": "colour"}}, "json: Unknown format: colour"),
        ({"json_object": True, "whitespace_pattern": "["}, "json_object: .*unclosed character class"),
        ({"grammar": 'root ::= "a'}, "grammar: .*Unexpected end of input"),
        ({"grammar": "root ::= nope"}, "grammar: .*Rule 'nope' not found"),
        ({"grammar": 'begin: "a"'}, "grammar: .*start"),
        ({"grammar": 'start: "a" foo'}, 'grammar: .*unknown name: "foo"'),
        ({"grammar": "start: start"}, "grammar: no token of this vocabulary goes on"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_librarys_reason(form: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^structured_outputs: {message}") as caught:
        at_start("byte level", structured_outputs=form)
    assert caught.value.field == "structured_outputs"
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"choice": [f"{i:020}" for i in range(60_000)]}, "choice: 1200000 characters are too much"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "regex: .*nested parentheses"),
        ({"grammar": "start: " + "( " * 3000 + '"a"' + ")" * 3000}, "grammar: .*too deeply nested"),
        ({"json": '{"not":' * 300 + "{}" + "}" * 300}, "json: "),
    ],
)
def test_what_would_take_too_long_is_refused(form: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^structured_outputs: {message}"):
        at_start("byte level", structured_outputs=form)


def test_what_it_contradicts() -> None:
    with pytest.raises(RequestError, match="^structured_outputs: .*ignore_eos"):
        at_start("byte level", structured_outputs={"regex": "a"}, ignore_eos=True)
    nobody = Grammars(None, 300, ())
    assert nobody.constraint(SamplingParams()) is None
    with pytest.raises(RequestError, match="^structured_outputs: this engine has no tokenizer"):
        nobody.constraint(SamplingParams(structured_outputs={"regex": "a"}))


def test_a_vocabulary_that_cannot_spell_a_form_says_so() -> None:
    # No padding, and the width of the logits is no multiple of 32.
    tokenizer = Tokenizer(byte_level_of([b"a", b"b", b"ab"]), 3)
    own = Grammars(tokenizer, 3, (2,))
    with pytest.raises(RequestError, match="regex: no token of this vocabulary goes on"):
        own.constraint(SamplingParams(structured_outputs={"regex": "c+"}))


def test_a_form_is_compiled_once_and_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtoken.engine import structured

    compiled: list[str] = []
    real = structured._compile
    monkeypatch.setattr(structured, "_compile", lambda form, *rest: compiled.append(form.regex) or real(form, *rest))
    own = grammars("byte level")
    for _ in range(3):
        own.constraint(SamplingParams(structured_outputs={"regex": "a+"}))
    assert compiled == ["a+"]
    for i in range(MAX_CACHED - 1):
        own.constraint(SamplingParams(structured_outputs={"regex": f"b{{{i + 1}}}"}))
        own.constraint(SamplingParams(structured_outputs={"regex": "a+"}))  # in use, so it stays
    assert compiled.count("a+") == 1
    own.constraint(SamplingParams(structured_outputs={"regex": "c"}))
    own.constraint(SamplingParams(structured_outputs={"regex": "b{1}"}))
    assert compiled.count("b{1}") == 2, "of the others the oldest had to go"


def test_threads_may_compile_at_once() -> None:
    own = grammars("byte level")
    found: list[list[int]] = []

    def ask() -> None:
        for form in ({"regex": "[a-c]x"}, {"choice": ["ax", "bx", "cx"]}) * 5:
            constraint = own.constraint(SamplingParams(structured_outputs=form))
            assert constraint is not None
            found.append(allowed(constraint))

    threads = [Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    assert all(each == found[0] for each in found)


def test_json_without_whitespace() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    for spaced, options in ((False, {"disable_any_whitespace": True}), (True, {})):
        constraint = at_start("byte level", structured_outputs={"json": json.dumps(schema), **options})
        constraint.follow(TOKENIZERS["byte level"].encode("{"))
        texts = {TOKENIZERS["byte level"].decode([token]) for token in allowed(constraint)}
        assert any(text.isspace() for text in texts) == spaced
