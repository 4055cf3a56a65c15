"""Chat: messages as clients send them, `LLM.chat`, `AsyncLLM.chat`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models, tiny_tokenizers
from vtoken import LLM, AsyncLLM, EngineError, RequestError, SamplingParams
from vtoken.engine.chat import check_messages, list_conversations
from vtoken.engine.text import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
HI = [{"role": "user", "content": "Hi"}]
LOOP: dict[str, Any] = {}
LOOP["itself"] = LOOP
TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())
# Shows all that a template is handed.
SHOWS = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.tool_calls | tojson if m.tool_calls }}]{% endfor %}"
    "{{ tools | tojson if tools else 'no tools' }}{{ mood }}{{ '>' if add_generation_prompt }}"
)


def shown(messages: Any, **options: Any) -> str:
    token_ids = TOKENIZER.encode_chat(messages, chat_template=SHOWS, **options)
    return str(TOKENIZER.backend.decode(token_ids))


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hi", "Hi"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        (["one", {"type": "text", "text": "two", "cache_control": {}}], "one\ntwo"),
    ],
)
def test_content_in_every_form_becomes_text(content: Any, text: str) -> None:  # U73
    assert check_messages([{"role": "user", "content": content}]) == [{"role": "user", "content": text}]
    assert shown([{"role": "user", "content": content}]) == f"[user|{text}|]no tools>"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Hi", r"messages\[1\]: expected an object with a role and content, got 'Hi'"),
        ({}, r"messages\[1\]\.role: missing; expected one of system, developer, user, assistant, tool"),
        ({"content": "x"}, r"messages\[1\]\.role: missing"),
        ({"role": "foo", "content": "x"}, r"messages\[1\]\.role: unknown role 'foo'; expected one of"),
        ({"role": ["user"], "content": "x"}, r"messages\[1\]\.role: unknown role"),
        ({"role": "user"}, r"messages\[1\]\.content: missing"),
        ({"role": "assistant"}, r"messages\[1\]\.content: missing"),
        ({"role": "assistant", "tool_calls": []}, r"messages\[1\]\.content: missing"),
        ({"role": "user", "content": 5}, r"messages\[1\]\.content: expected text, or a list of text parts, got 5"),
        ({"role": "user", "content": {"type": "text"}}, r"messages\[1\]\.content: expected text"),
        ({"role": "user", "content": b"x"}, r"messages\[1\]\.content: expected text"),
        ({"role": "user", "content": [7]}, r"messages\[1\]\.content\[0\]: expected a text part, got 7"),
        (
            {"role": "user", "content": ["x", {"type": "image_url", "image_url": {"url": "http://x"}}]},
            r"messages\[1\]\.content\[1\]: parts of type 'image_url' are not taken, only text is",
        ),
        ({"role": "user", "content": [{"text": "x"}]}, r"content\[0\]: parts of type None are not taken"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\]\.text: expected text, got None"),
        ({"role": "user", "content": "ab\ud800"}, r"messages\[1\]\.content: character 2 is half a surrogate pair"),
        (
            {"role": "user", "content": [{"type": "text", "text": "\udfff"}]},
            r"messages\[1\]\.content\[0\]\.text: character 0 is half a surrogate pair",
        ),
        ({"role": "assistant", "content": "", "tool_calls": "x"}, r"messages\[1\]\.tool_calls: expected a list"),
        ({"role": "assistant", "content": "", "tool_calls": [3]}, r"tool_calls\[0\]: expected an object, got 3"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            r"messages\[1\]\.tool_calls\[0\]\.function\.arguments: expected JSON",
        ),
    ],
)
def test_a_wrong_message_is_refused_by_its_index(message: Any, said: str) -> None:  # U73, U83
    with pytest.raises(RequestError, match=said) as refusal:
        TOKENIZER.encode_chat([*HI, message])
    assert refusal.value.field == "messages"


@pytest.mark.parametrize("messages", ["Hi", None, 5, {"role": "user", "content": "x"}, b"x"])
def test_what_is_no_list_is_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="messages: expected a list of messages, got"):
        TOKENIZER.encode_chat(messages)


def test_an_empty_conversation_is_refused() -> None:  # U39
    with pytest.raises(RequestError, match="messages: expected at least one message, got none"):
        TOKENIZER.encode_chat([])


def test_a_surrogate_elsewhere_is_found_too() -> None:
    with pytest.raises(RequestError, match="messages: character 0 is half a surrogate pair"):
        TOKENIZER.encode_chat([HI[0] | {"name": "\ud800"}], chat_template="{{ messages[0].name }}")


@pytest.mark.parametrize("value", [{1}, object(), float("nan"), "\ud800", b"x", LOOP])
def test_what_is_no_json_does_not_reach_the_template(value: Any) -> None:
    """Of which it would write something anyway, such as "<set>"."""
    call = {"function": {"name": "f", "arguments": {"a": value}}}
    for messages, tools, where in (
        (HI, [{"type": "function", "function": value}], "tools[0]"),
        ([{"role": "assistant", "tool_calls": [call]}], None, "messages[0].tool_calls[0]"),
    ):
        with pytest.raises(RequestError) as refusal:
            TOKENIZER.encode_chat(messages, tools=tools)
        assert str(refusal.value).startswith(f"{where}: expected what JSON can say: ")
        assert refusal.value.field == where.partition("[")[0]


@pytest.mark.parametrize("arguments", ["NaN", '{"a": Infinity}', '"\\ud800"'])
def test_arguments_that_only_python_takes_for_json_are_refused(arguments: str) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    with pytest.raises(RequestError, match=r"^messages\[0\].tool_calls\[0\]: expected what JSON can say"):
        TOKENIZER.encode_chat([{"role": "assistant", "tool_calls": calls}])


def test_developer_is_system_unless_the_template_knows_better() -> None:
    messages = [{"role": "developer", "content": "Be brief."}]
    assert shown(messages) == "[system|Be brief.|]no tools>"
    knows = "{{ messages[0].role }}{# developer #}"
    assert TOKENIZER.backend.decode(TOKENIZER.encode_chat(messages, chat_template=knows)) == "developer"


def test_the_callers_messages_stay_as_they_are() -> None:
    message = {"role": "developer", "content": ["x"], "tool_calls": [{"function": {"arguments": "{}"}}]}
    check_messages([message])
    assert message == {"role": "developer", "content": ["x"], "tool_calls": [{"function": {"arguments": "{}"}}]}


def test_tool_calls_and_their_answers_reach_the_template() -> None:
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "ok", "tool_call_id": "1"},
    ]
    expected = '[assistant||[{"function": {"name": "f", "arguments": {"a": 1}}}]][tool|ok|]no tools>'
    assert shown(messages) == expected


# --- templates --------------------------------------------------------------------------------------------------------


def test_what_the_template_is_handed() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert '"name": "f"' in shown(HI, tools=[tool])
    assert shown(HI, tools=[]) == shown(HI, tools=None) == "[user|Hi|]no tools>"
    assert shown(HI, add_generation_prompt=False) == "[user|Hi|]no tools"
    assert shown(HI, chat_template_kwargs={"mood": "gay"}) == "[user|Hi|]no toolsgay>"


def test_a_message_can_be_gone_on_with() -> None:
    messages = [*HI, {"role": "assistant", "content": "Hello the"}]
    token_ids = TOKENIZER.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert TOKENIZER.backend.decode(token_ids) == "<|user|>Hi<end><|assistant|>Hello the"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": 5}, "chat_template"),
        ({"tools": "f"}, "tools"),
        ({"tools": [5]}, "tools"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {5: 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refusal:
        TOKENIZER.encode_chat(HI, **options)
    assert refusal.value.field == field
    assert str(refusal.value).startswith(field)


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "{% if %}", "{{ 1 / 0 }}", "{{ messages[9].content }}", "{{ nothing.at.all }}"],
)
def test_a_template_that_raises_is_a_wrong_request(template: str) -> None:  # U74
    with pytest.raises(RequestError, match="messages: the chat template refused them: .") as refusal:
        TOKENIZER.encode_chat(HI, chat_template=template)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tiny_tokenizers.byte_level()
    folder = tiny_models.save_llama(tmp_path_factory.mktemp("chat"), vocab_size=len(tokenizer))
    return tiny_tokenizers.save(tokenizer, folder)


@pytest.fixture(scope="module")
def llm(chat_folder: Path):
    with LLM(str(chat_folder), num_blocks=64, max_model_len="auto") as llm:
        yield llm


def test_chat_answers_what_its_format_says(llm: LLM) -> None:
    text = "<|user|>Hi<end><|assistant|>"
    [expected] = llm.generate(llm.get_tokenizer().encode(text, add_special_tokens=False), GREEDY, use_tqdm=False)
    [found] = llm.chat(HI, GREEDY, use_tqdm=False)
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.outputs == expected.outputs


def test_many_conversations_each_with_its_parameters(llm: LLM) -> None:
    bye = [*HI, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
    params = [GREEDY, GREEDY.replace(max_tokens=3)]
    found = llm.chat([HI, bye], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in found] == [8, 3]
    for output, conversation in zip(found, (HI, bye), strict=True):
        assert output.prompt_token_ids == llm.get_tokenizer().encode_chat(conversation)
    assert llm.chat([HI], GREEDY, use_tqdm=False)[0].outputs == found[0].outputs


def test_the_default_length_is_that_of_sampling_params(llm: LLM) -> None:  # U75
    [found] = llm.chat(HI, SamplingParams(ignore_eos=True), use_tqdm=False)
    assert len(found.outputs[0].token_ids) == 16


def test_a_wrong_conversation_is_named_before_anything_runs(llm: LLM) -> None:
    before = llm.stats().scheduler.steps
    with pytest.raises(RequestError, match=r"conversation 1 of 2: messages\[0\]\.role: unknown role"):
        llm.chat([HI, [{"role": "foo", "content": ""}]], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="got both mixed"):
        llm.chat([HI, HI[0]], GREEDY)
    with pytest.raises(RequestError, match="expected at least one message"):
        llm.chat([], GREEDY)
    assert llm.stats().scheduler.steps == before
    assert list_conversations([HI, HI]) == [HI, HI]


def test_without_a_template_chat_says_how_to_give_one(folder: Path) -> None:  # U74
    with LLM(str(folder), num_blocks=16, max_model_len="auto") as llm:
        with pytest.raises(RequestError, match="no chat template; give one with chat_template=") as refusal:
            llm.chat(HI, GREEDY)
        assert refusal.value.field == "messages"
        [found] = llm.chat(HI, GREEDY, chat_template="{{ messages[0].content }}", use_tqdm=False)
        [expected] = llm.generate("Hi", GREEDY, use_tqdm=False)
        assert found.outputs == expected.outputs


def test_without_a_tokenizer_there_is_no_chat(folder: Path) -> None:
    with (
        LLM(str(folder), num_blocks=16, max_model_len="auto", skip_tokenizer_init=True) as llm,
        pytest.raises(EngineError, match="no tokenizer"),
    ):
        llm.chat(HI, GREEDY)


def test_async_chat_gives_the_same_answer(llm: LLM, chat_folder: Path) -> None:
    [expected] = llm.chat(HI, GREEDY, use_tqdm=False)

    async def main() -> None:
        async with AsyncLLM(str(chat_folder), num_blocks=64, max_model_len="auto") as face:
            [found] = [output async for output in face.chat(HI, GREEDY, output_kind="final")]
            assert found.outputs == expected.outputs
            with pytest.raises(RequestError, match=r"messages\[0\]"):
                await face.chat([{}], GREEDY).start()
            with pytest.raises(RequestError, match="add_generation_prompt=False"):
                await face.chat(HI, GREEDY, continue_final_message=True).start()

    asyncio.run(main())
