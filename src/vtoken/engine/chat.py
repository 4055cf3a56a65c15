"""Chat messages as clients send them, made into what chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from vtoken.base.errors import RequestError
from vtoken.base.validation import shorten

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


def list_conversations(messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]]) -> list[SequenceOf[Message]]:
    """One conversation or many: a list of messages, or of such lists. Raises RequestError for neither."""
    if not _is_list(messages):
        raise _wrong("messages", f"expected a list of messages, got {shorten(messages)}")
    are_lists = {_is_list(each) for each in messages}
    if are_lists == {True}:
        return list(messages)  # type: ignore[arg-type]
    if True in are_lists:
        raise _wrong("messages", "expected one conversation or a list of conversations, got both mixed")
    return [messages]  # type: ignore[list-item]


def check_messages(messages: SequenceOf[Message], *, knows_developer: bool = False) -> list[dict[str, Any]]:
    """Copies of `messages` in the form that templates take: `content` is text in each, and roles are known ones.

    Text parts are joined by line breaks, as vLLM does; None is "". "developer" is the newer name of "system", and
    becomes that unless the template knows it. The arguments of tool calls, which clients send as JSON text, become
    objects. Other fields are left to the template.

    Raises RequestError that names the index of what is wrong.
    """
    if not _is_list(messages):
        raise _wrong("messages", f"expected a list of messages, got {shorten(messages)}")
    if not messages:
        raise _wrong("messages", "expected at least one message, got none")
    return [_check_message(message, f"messages[{i}]", knows_developer) for i, message in enumerate(messages)]


def check_tools(tools: SequenceOf[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Descriptions of functions for the template; none is None. Raises RequestError for anything else, and for what is
    no JSON: of that a template would write whatever comes."""
    if tools is None:
        return None
    if not _is_list(tools):
        raise RequestError(f"tools: expected a list of tools, got {shorten(tools)}", "tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{i}]: expected an object that describes a tool, got {shorten(tool)}", "tools")
        _check_json(dict(tool), f"tools[{i}]", "tools")
    return [dict(tool) for tool in tools] or None


def _check_message(message: Message, where: str, knows_developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(where, f"expected an object with a role and content, got {shorten(message)}")
    role = message.get("role")
    if role not in ROLES:
        found = "missing" if role is None else f"unknown role {shorten(role)}"
        raise _wrong(f"{where}.role", f"{found}; expected one of {', '.join(ROLES)}")
    checked = dict(message)
    if role == "developer" and not knows_developer:
        checked["role"] = "system"
    calls = message.get("tool_calls")
    if "content" not in message and not (role == "assistant" and calls):
        raise _wrong(f"{where}.content", "missing; expected text, or a list of text parts")
    checked["content"] = _text(message.get("content"), f"{where}.content")
    if calls is not None:
        checked["tool_calls"] = _check_calls(calls, f"{where}.tool_calls")
    return checked


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return _unicode(content, where)
    if not _is_list(content):
        raise _wrong(where, f"expected text, or a list of text parts, got {shorten(content)}")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return _unicode(part, where)
    if not isinstance(part, Mapping):
        raise _wrong(where, f"expected a text part, got {shorten(part)}")
    if part.get("type") != "text":
        raise _wrong(where, f"parts of type {shorten(part.get('type'))} are not taken, only text is")
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{where}.text", f"expected text, got {shorten(part.get('text'))}")
    return _unicode(part["text"], f"{where}.text")


def _check_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not _is_list(calls):
        raise _wrong(where, f"expected a list of tool calls, got {shorten(calls)}")
    return [_check_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _check_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _wrong(where, f"expected an object, got {shorten(call)}")
    checked, function = dict(call), call.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            raise _wrong(f"{where}.function.arguments", f"expected JSON, got what is none: {error}") from None
        checked["function"] = {**function, "arguments": arguments}
    _check_json(checked, where, "messages")
    return checked


def _check_json(value: object, where: str, field: str) -> None:
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where}: expected what JSON can say: {error}", field) from None


def _unicode(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _wrong(where, f"character {error.start} is half a surrogate pair, not text") from None
    return text


def _is_list(value: object) -> bool:
    return isinstance(value, SequenceOf) and not isinstance(value, str | bytes | bytearray | memoryview)


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where}: {what}", "messages")
