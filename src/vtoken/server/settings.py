"""`ServerSettings`: everything the server is told at start that is not the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, Strict, model_validator

from vtoken.base.errors import ConfigError
from vtoken.base.units import parse_bytes
from vtoken.base.validation import Settings, setting

_SWITCH = "True or False"
_SIZE = "bytes as a whole number, or text such as '16MiB'"
_COUNT = "a whole number from 1 up"
_SECONDS = "a number of seconds above 0"
_parse_size = BeforeValidator(lambda size: parse_bytes(size) if isinstance(size, str) else size)
_Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Strict(False),
    BeforeValidator(lambda texts: () if texts is None else (texts,) if isinstance(texts, str) else texts),
]
_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Seconds = Annotated[float, Field(gt=0, le=1e6)]


def _read_template(given: Any) -> Any:
    """A file's text in place of its path."""
    if not isinstance(given, str) or "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ValueError(f"the file {given!r} cannot be read: {reason}") from None


METRICS_PREFIX = "vtoken:"
METRICS_PREFIX_PATTERN = r"^([a-zA-Z_:][a-zA-Z0-9_:]*)?$"
METRICS_PREFIX_EXPECTED = "letters, digits, '_' and ':', with no digit first"
LogLevel = Literal["critical", "error", "warning", "info", "debug"]


class ServerSettings(Settings):
    """Settings of the server around an engine. Raises ConfigError for what is wrong."""

    kind: ClassVar[str] = "server setting"
    example: ClassVar[str] = "port=8000"
    elsewhere: ClassVar[Mapping[str, str]] = {}

    host: str = setting(
        "Address to listen on; 0.0.0.0 is every address of this machine.",
        expected="an address or a host name",
        default="127.0.0.1",
        min_length=1,
    )
    port: Annotated[int, Field(ge=0, le=65535)] = setting(
        "Port to listen on; 0 takes a free one.", expected="a whole number from 0 to 65535", default=8000
    )
    served_model_name: _Texts = setting(
        "Names that clients may call the model, the first one being told; without it, the model as given.",
        expected="a name, or a sequence of names",
        default=(),
    )
    api_key: _Texts = setting(
        "Keys of which clients must send one as 'Authorization: Bearer KEY'; without it anybody is served.",
        expected="a text that is not empty, or a sequence of such texts",
        default=(),
    )
    allowed_origins: _Texts = setting(
        "Origins whose web pages may call the server from a browser (CORS); * is any.",
        expected="an origin such as 'https://example.com', or a sequence of them",
        default=(),
    )
    root_path: str = setting(
        "Path under which a reverse proxy shows the server, such as /llm.",
        expected="'' or a path that starts with / and does not end with one",
        default="",
        pattern=r"^(/[^/\s]+)*$",
    )
    chat_template: Annotated[str | None, BeforeValidator(_read_template)] = setting(
        "A Jinja template for chats instead of the model's own: a file, or the template itself.",
        expected="a file, or a template with {{ }} or {% %} in it, or None (the model's own)",
        default=None,
        min_length=1,
    )
    trust_request_chat_template: bool = setting(
        "Let requests bring a chat_template of their own; a template can keep a processor busy for ever.",
        expected=_SWITCH,
        default=False,
    )
    max_body_size: Annotated[int, Field(ge=1024, lt=2**63), _parse_size] = setting(
        "The largest body of a request, in bytes; what is larger is refused (413) without being read.",
        expected=_SIZE,
        default=16 * 1024**2,
    )
    max_prompts: _Count = setting("The most prompts in one request.", expected=_COUNT, default=1024)
    max_queued_requests: _Count | None = setting(
        "Choices that may wait for their first step; with more, requests are refused (429).",
        expected=f"{_COUNT}, or None (no limit)",
        default=4096,
    )
    max_queued_tokens: _Count | None = setting(
        "The same in tokens of their prompts.", expected=f"{_COUNT}, or None (no limit)", default=None
    )
    stuck_after: _Seconds = setting(
        "Seconds without the end of a step, while there is work, after which /health answers 503.",
        expected=_SECONDS,
        default=20.0,
    )
    drain_timeout: Annotated[float, Field(ge=0, le=1e6)] = setting(
        "Seconds that running answers get to end when the server is told to stop; then they end with an error.",
        expected="a number of seconds from 0 up",
        default=30.0,
    )
    keep_alive_timeout: _Seconds = setting(
        "Seconds after which an idle connection is closed.", expected=_SECONDS, default=65.0
    )
    ssl_certfile: str | None = setting(
        "Certificate for HTTPS, in PEM form.", expected="a file, or None (plain HTTP)", default=None, min_length=1
    )
    ssl_keyfile: str | None = setting(
        "Private key of the certificate.",
        expected="a file, or None (it is in ssl_certfile)",
        default=None,
        min_length=1,
    )
    dashboard: bool = setting(
        "Show the memory at work under /dashboard; what it shows needs a key where there are keys.",
        expected=_SWITCH,
        default=True,
    )
    metrics_prefix: str = setting(
        "What the names under /metrics begin with; vllm: gives those of vLLM where the meaning is the same.",
        expected=METRICS_PREFIX_EXPECTED,
        default=METRICS_PREFIX,
        pattern=METRICS_PREFIX_PATTERN,
    )
    metrics_need_key: bool = setting(
        "Whether /metrics needs a key where there are keys.", expected=_SWITCH, default=True
    )
    otlp_traces_endpoint: str | None = setting(
        "Where to send a trace of each request, by OpenTelemetry's protocol over HTTP; needs the extra otel.",
        expected="an address such as 'http://localhost:4318/v1/traces', or None (no traces)",
        default=None,
        pattern=r"^https?://[^\s]+$",
    )
    log_level: LogLevel = setting(
        "What is logged; info has a line for each request, debug also the kernels that were chosen.",
        expected="one of 'critical', 'error', 'warning', 'info', 'debug'",
        default="info",
    )

    @classmethod
    def refuse(cls, message: str, field: str | None) -> ConfigError:
        return ConfigError(message)

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile: has no effect without ssl_certfile")
        return self
