"""The activation that a config names, as the kernels call it."""

from __future__ import annotations

from typing import Final

from vtoken.base.errors import CheckpointError
from vtoken.base.validation import shorten
from vtoken.kernels.fused import Activation
from vtoken.models.config import CheckpointConfig

# Names of transformers; those that mean one function differ by rounding.
_NAMES: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}


def read_activation(config: CheckpointConfig, key: str, default: str) -> Activation:
    """The activation under `key`. Raises CheckpointError for one that is not computed here."""
    name = config.text(key, default=default)
    if name not in _NAMES:
        raise CheckpointError(
            f"{config.path}: {key} {shorten(name)} is not supported for {config.architecture}; supported are "
            f"{', '.join(_NAMES)}"
        )
    return _NAMES[name]
