"""Settings that refuse what is wrong, in the user's words.

Pydantic checks; this module alone turns its findings into our errors. Each field is declared with `setting`, which
takes what it is (for `--help` and docs) and what is expected of a value: one phrase for every way to miss it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vtoken.base.errors import VtokenError
from vtoken.base.registry import suggest

_LONGEST_VALUE = 60  # characters of a refused value that are shown: it may be a whole prompt


def setting(about: str, expected: str, **rest: Any) -> Any:
    """A field of `Settings`. `expected` is worded to follow "expected"; `rest` is pydantic's (default, ge, le, ...)."""
    return Field(description=about, json_schema_extra={"expected": expected}, **rest)


class Settings(BaseModel):
    """Frozen keyword-only settings. Nothing is coerced: no bool as a number, no "2", no 1.0 as a whole number.

    A subclass names its own error in `refuse`; every message starts with the name of the field at fault.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    kind: ClassVar[str]  # what one field is called in messages: "sampling parameter"
    example: ClassVar[str]  # one field as it is given, for messages: "temperature=0.8"
    # Names of other engines that are no field here -> what to say of them: a guess by spelling would mislead.
    elsewhere: ClassVar[Mapping[str, str]] = {}

    def __init__(self, /, *positional: Any, **values: Any) -> None:
        if positional:
            raise self.refuse(
                f"{type(self).__name__} takes names only, such as {self.example}; got {shorten(positional[0])} without "
                "a name",
                None,
            )
        try:
            super().__init__(**values)
        except ValidationError as error:
            message, field = self._explain(error)
            raise self.refuse(message, field) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Give `help(cls)` the meaning of each field."""
        fields = [
            f"    {name}: {field.description}{cls._default_text(name)}" for name, field in cls.model_fields.items()
        ]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Fields:", *fields])

    @classmethod
    def _default_text(cls, field: str) -> str:
        info = cls.model_fields[field]
        return "" if info.is_required() else f" Default: {info.default!r}."

    @classmethod
    def refuse(cls, message: str, field: str | None) -> VtokenError:
        """The error that a user of this class gets for `field`, the first of a contradiction, or None."""
        raise NotImplementedError

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(cls.model_fields)

    def replace(self, **changes: Any) -> Self:
        """A copy with `changes`, checked like a new one."""
        return type(self)(**{name: getattr(self, name) for name in self.names()} | changes)

    @classmethod
    def expectation(cls, field: str) -> str:
        """What a value of `field` must be, worded to follow "expected"."""
        extra = cls.model_fields[field].json_schema_extra
        assert isinstance(extra, dict), f"{cls.__name__}.{field} is not declared with setting()"
        return str(extra["expected"])

    @classmethod
    def _explain(cls, error: ValidationError) -> tuple[str, str | None]:
        """One line over all findings, one a field, and the field of the first."""
        # A union reports a finding for each of its branches: the first one speaks for the field.
        findings = {str(found["loc"][0]) if found["loc"] else None: found for found in reversed(error.errors())}
        fields = list(reversed(findings))
        message = "; ".join(cls._explain_one(field, findings[field]) for field in fields)
        # A contradiction has no place, but its message begins with the first of its fields.
        named = message.partition(":")[0]
        return message, named if fields[0] is None and named in cls.model_fields else fields[0]

    @classmethod
    def _explain_one(cls, field: str | None, found: Any) -> str:
        # A validator of ours says what is wrong itself.
        detail = str(found["ctx"]["error"]) if found["type"] == "value_error" else None
        if field is None:
            assert detail is not None, f"pydantic found what no validator of ours says: {found}"
            return detail
        if found["type"] == "extra_forbidden" and field in cls.elsewhere:
            return f"{field}: {cls.elsewhere[field]}"
        if found["type"] == "extra_forbidden":
            known = list(cls.names())
            return f"{field}: unknown {cls.kind}; {suggest(field, known)}known: {', '.join(known)}"
        expected = cls.expectation(field)
        if found["type"] == "missing":
            return f"{field}: missing; expected {expected}"
        if detail is not None:
            return f"{field}: {detail}"
        where = "".join(f" at index {part}" for part in found["loc"][1:] if isinstance(part, int))
        return f"{field}: expected {expected}, got {shorten(found['input'])}{where}"


def shorten(value: object) -> str:
    """`repr(value)`, cut to a length that fits a one-line message."""
    try:
        text = repr(value[:_LONGEST_VALUE] if isinstance(value, str | bytes | list | tuple) else value)
    except ValueError:  # Python refuses to print whole numbers of more than 4,300 digits
        text = f"a huge {type(value).__name__}"
    except Exception:  # an object of anybody's, or lists in lists in lists
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
