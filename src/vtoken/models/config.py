"""Read `config.json` and `generation_config.json` of a checkpoint folder.

Plain json on purpose: `transformers.AutoConfig` costs seconds of import, fills in defaults where we want to see what is
missing, and may look on the network. Without torch, so that planning for a model does not cost its import either.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, Final, TypeVar

from vtoken.base.errors import CheckpointError
from vtoken.base.validation import shorten
from vtoken.models.json_object import read_json_object
from vtoken.models.registry import supported_architectures
from vtoken.models.rope_scaling import RopeParameters
from vtoken.models.spec import AttentionSpec, ModelSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REQUIRED: Final[Any] = object()

# Beyond every real model, and small enough that ids and positions are int32 and no product of sizes leaves int64.
_MAX_INTEGER: Final = 10**9
_MAX_WIDTH: Final = 500_000  # of a hidden state or a head, and the number of heads
_MAX_LAYERS: Final = 1_000
# What float32 can multiply and divide without coming near its ends.
_MIN_NUMBER: Final = 1e-12
_MAX_NUMBER: Final = 1e12

# What transformers takes for a key that the config does not mention. A window of null in the file is none.
_DEFAULT_WINDOWS: Final = {"MistralForCausalLM": 4096, "Phi3ForCausalLM": None}
_DEFAULT_HEAD_DIMS: Final = {"Qwen3ForCausalLM": 128}
# Architectures whose windows have a switch of their own.
_SWITCHED_WINDOWS: Final = frozenset({"Qwen2ForCausalLM", "Qwen3ForCausalLM"})


# What an architecture calls a key that the others agree on.
_KEY_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "GPT2LMHeadModel": {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    },
}


# Where models of text and more keep the config of the part that writes text, which is all that is run here.
_TEXT_SECTIONS: Final = {"Gemma3ForConditionalGeneration": "text_config"}


class ConfigSection:
    """A JSON object whose values are read with their types checked; every error names file, key and value.

    A key that is null counts as absent.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path  # the file, for error texts
        self._values = values
        self._prefix = prefix
        self._names: Mapping[str, str] = {}  # usual key -> the file's

    def integer(self, key: str, default: int = _REQUIRED, maximum: int = _MAX_INTEGER, minimum: int = 1) -> int:
        value = self._read(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self._wrong(key, f"an integer from {minimum} to {maximum}", value)
        return value

    def number(
        self, key: str, default: float = _REQUIRED, minimum: float = _MIN_NUMBER, maximum: float = _MAX_NUMBER
    ) -> float:
        """A finite number, above zero unless `minimum` says else."""
        value = self._read(key, default)
        if not _is_number(value, minimum, maximum):
            raise self._wrong(key, f"a number from {minimum:g} to {maximum:g}", value)
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of so many numbers above zero."""
        value = self._read(key, _REQUIRED)
        if not isinstance(value, list) or not all(_is_number(each, _MIN_NUMBER, _MAX_NUMBER) for each in value):
            raise self._wrong(key, f"a list of numbers from {_MIN_NUMBER:g} to {_MAX_NUMBER:g}", value)
        if len(value) != count:
            raise self._wrong(key, f"a list of {count} numbers", len(value))
        return tuple(map(float, value))

    def flag(self, key: str, default: bool) -> bool:
        value = self._read(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str = _REQUIRED) -> str:
        value = self._read(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def section(self, key: str) -> ConfigSection | None:
        """The object under `key`, or None when it is absent, null or empty."""
        value = self._values.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object", value)
        return ConfigSection(self.path, value, prefix=f"{self._prefix}{key}.") if value else None

    def texts(self, key: str) -> list[str] | None:
        """A list of strings, or None when it is absent or null."""
        value = self._values.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise self._wrong(key, "a list of strings", value)
        return value

    def says(self, key: str) -> bool:
        """Whether the file gives a value, and not null."""
        return self._values.get(key) is not None

    def as_dict(self) -> dict[str, Any]:
        """The values, unchecked."""
        return dict(self._values)

    def is_null(self, key: str) -> bool:
        """Whether the file says null, where that differs from saying nothing."""
        return key in self._values and self._values[key] is None

    def token_ids(self, key: str, vocab_size: int) -> frozenset[int]:
        """An id, a list of ids, or nothing; all in [0, vocab_size)."""
        value = self._values.get(key)
        ids = _as_list(value)
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
            raise self._wrong(key, f"a token id or a list of token ids from 0 to {vocab_size - 1}", value)
        return frozenset(ids)

    def _read(self, key: str, default: T) -> T:
        value = self._values.get(self._names.get(key, key))
        if value is not None:
            return value  # type: ignore[no-any-return]  # the caller checks the type
        if default is _REQUIRED:
            raise CheckpointError(f"{self.path}: required key {self._full_name(key)!r} is missing")
        return default

    def _full_name(self, key: str) -> str:
        return self._prefix + self._names.get(key, key)

    def _wrong(self, key: str, expected: str, found: object) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self._full_name(key)!r} must be {expected}, found {shorten(found)}")


def _is_number(value: object, minimum: float, maximum: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= maximum


class CheckpointConfig(ConfigSection):
    """The `config.json` of a folder, of an architecture that we have."""

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        super().__init__(folder / "config.json", values)
        self.folder = folder
        self.architecture = self._supported_architecture()
        self._names = _KEY_NAMES.get(self.architecture, {})
        self._check_quantization()
        self._lift_text_section()

    def revised(self, *, defaults: Mapping[str, Any] | None = None, **changes: Any) -> CheckpointConfig:
        """A copy with other values: `changes` hold whatever the file says, `defaults` where it says nothing."""
        copied = copy(self)
        copied._values = {**(defaults or {}), **self._values, **changes}
        return copied

    def _lift_text_section(self) -> None:
        """Read the section that describes the language model as if it were the file."""
        key = _TEXT_SECTIONS.get(self.architecture)
        text = None if key is None else self.section(key)
        if text is None:
            return
        stop_ids = [each for ids in (self._values, text.as_dict()) for each in _as_list(ids.get("eos_token_id"))]
        self._values = {**self._values, **text.as_dict()} | ({"eos_token_id": stop_ids} if stop_ids else {})

    @property
    def head_dim(self) -> int:
        """Width of a head. Not every model has `hidden_size` / heads, and not every one says so."""
        default = _DEFAULT_HEAD_DIMS.get(self.architecture)
        if default is None:
            heads = self.integer("num_attention_heads", maximum=_MAX_WIDTH)
            default = self.integer("hidden_size", maximum=_MAX_WIDTH) // heads
        return self.integer("head_dim", default=default, maximum=_MAX_WIDTH)

    def _supported_architecture(self) -> str:
        found = self._values.get("architectures")
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found) or not found:
            raise self._wrong("architectures", "a list of class names such as ['LlamaForCausalLM']", found)
        supported = supported_architectures()
        for name in found:
            if name in supported:
                return str(name)
        raise CheckpointError(
            f"{self.path}: architecture {', '.join(found)} is not supported; supported are {', '.join(supported)}"
        )

    def _check_quantization(self) -> None:
        quantization = self.section("quantization_config")
        if quantization is None:
            return
        method = quantization.text("quant_method", default="unknown")
        # transformers leaves this note in the config of a model that it has dequantised from GGUF.
        if method != "gguf":
            raise CheckpointError(
                f"{self.path}: weights quantised by {method!r} cannot be served; use the unquantised checkpoint "
                "(float32, bfloat16 or float16 safetensors) or a GGUF file"
            )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def read_config(folder: Path) -> CheckpointConfig:
    """Read and check `folder/config.json`. Raises CheckpointError: what was expected, what was found, what to do."""
    path = folder / "config.json"
    try:
        _check_holds(folder, path)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror}); expected a checkpoint folder") from error
    return CheckpointConfig(folder, read_json_object(path))


def _check_holds(folder: Path, path: Path) -> None:
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist; expected a checkpoint folder or a .gguf file")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected a checkpoint folder or a .gguf file")
    if not path.is_file():
        found = sorted(entry.name for entry in folder.iterdir()) or ["nothing"]
        raise CheckpointError(
            f"{folder}: expected a Hugging Face checkpoint (config.json, *.safetensors, tokenizer files), found "
            + ", ".join(found if len(found) <= 5 else [*found[:5], "..."])
        )


def read_model_spec(config: CheckpointConfig, *, is_rotary: bool = True) -> ModelSpec:
    """The `ModelSpec` of a checkpoint whose config uses the usual key names (Llama, Mistral and their kin)."""
    hidden_size = config.integer("hidden_size", maximum=_MAX_WIDTH)
    num_heads = config.integer("num_attention_heads", maximum=_MAX_WIDTH)
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{config.path}: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    head_dim = config.head_dim
    if is_rotary and head_dim % 2:
        raise CheckpointError(f"{config.path}: rotary embedding needs an even head_dim, found {head_dim}")
    if not is_rotary and (num_kv_heads, num_heads * head_dim) != (num_heads, hidden_size):
        raise CheckpointError(
            f"{config.path}: {config.architecture} needs as many KV heads as heads, and these fill the hidden size, "
            f"found {num_heads} heads, {num_kv_heads} KV heads of {head_dim} and a hidden size of {hidden_size}"
        )
    num_layers = config.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    vocab_size = config.integer("vocab_size")
    rope = RopeParameters.from_config(config)
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=rope.reach(config.integer("max_position_embeddings")),
        layers=tuple(
            AttentionSpec(head_dim**-0.5, window, rotation=0 if is_rotary else None)
            for window in _sliding_windows(config, num_layers)
        ),
        eos_token_ids=config.token_ids("eos_token_id", vocab_size)
        | _generation_eos_token_ids(config.folder, vocab_size),
        bos_token_id=min(config.token_ids("bos_token_id", vocab_size), default=None),
        rope_lengths=rope.lengths,
    )


def _sliding_windows(config: CheckpointConfig, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer; None = a layer that sees everything."""
    if config.architecture in _SWITCHED_WINDOWS:
        return _switched_windows(config, num_layers)
    window = None
    if config.architecture in _DEFAULT_WINDOWS and not config.is_null("sliding_window"):
        window = _DEFAULT_WINDOWS[config.architecture]
        if config.says("sliding_window"):
            window = config.integer("sliding_window")
    return (window,) * num_layers


def _switched_windows(config: CheckpointConfig, num_layers: int) -> tuple[int | None, ...]:
    """Qwen's way: a switch, and the layers from `max_window_layers` on, unless `layer_types` names each."""
    window = None
    if config.flag("use_sliding_window", default=False) and not config.is_null("sliding_window"):
        window = config.integer("sliding_window", default=4096)
    types = config.texts("layer_types")
    if types is None:
        first = config.integer("max_window_layers", default=28, minimum=0)
        return tuple(window if i >= first else None for i in range(num_layers))
    known = ("full_attention", "sliding_attention") if window else ("full_attention",)
    if len(types) != num_layers or not set(types) <= set(known):
        without = "" if window else ", since no sliding window is switched on (use_sliding_window, sliding_window)"
        raise CheckpointError(
            f"{config.path}: 'layer_types' must name {' or '.join(known)} for each of {num_layers} layers{without}, "
            f"found {shorten(types)}"
        )
    return tuple(window if each == "sliding_attention" else None for each in types)


def _generation_eos_token_ids(folder: Path, vocab_size: int) -> frozenset[int]:
    """Stop ids of `generation_config.json`. Chat models often name theirs only there, some have no such file."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return frozenset()
    try:
        return ConfigSection(path, read_json_object(path)).token_ids("eos_token_id", vocab_size)
    except CheckpointError as error:
        logger.warning("%s; its stop ids are ignored", error)
        return frozenset()
