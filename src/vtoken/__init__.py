"""vtoken: an LLM engine on a paged KV cache with token-level eviction.

>>> from vtoken import LLM, SamplingParams
>>> with LLM("path/to/model") as llm:
...     [answer] = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8))
...     print(answer.outputs[0].text)

Importing this package is cheap: torch and transformers are loaded when the first engine starts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vtoken.base.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineError,
    InvariantError,
    QueueFullError,
    RequestError,
    VtokenError,
)

if TYPE_CHECKING:
    from vtoken.base.sampling_params import SamplingParams
    from vtoken.base.structured_outputs import StructuredOutputsParams
    from vtoken.engine.async_llm import AsyncLLM
    from vtoken.engine.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "InvariantError",
    "QueueFullError",
    "RequestError",
    "SamplingParams",
    "StructuredOutputsParams",
    "VtokenError",
    "__version__",
]

_LAZY = {
    "LLM": "vtoken.engine.llm",
    "AsyncLLM": "vtoken.engine.async_llm",
    "SamplingParams": "vtoken.base.sampling_params",
    "StructuredOutputsParams": "vtoken.base.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
