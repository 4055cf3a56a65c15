"""Fill a model from a checkpoint folder, and find the folder that a user's name for a model means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from vtoken.base.errors import CheckpointError, ConfigError
from vtoken.base.units import format_bytes
from vtoken.models.base import CausalLM, WeightTarget
from vtoken.models.config import read_config
from vtoken.models.kernels import BATCH_INVARIANT, Kernels
from vtoken.models.registry import model_class, supported_architectures
from vtoken.models.resolve import resolve_model
from vtoken.models.shards import FLOATS, Shard, find_shards, not_a_float

__all__ = ["load_model", "read_limits", "resolve_dtype", "resolve_model"]

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of "float32", "bfloat16", "float16" or "auto".

    "auto" is float32 whatever the checkpoint says: most CPUs emulate the narrow formats, slower and less exact.
    """
    if dtype == "auto":
        return torch.float32
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be 'auto' or one of {', '.join(map(repr, _DTYPES))}, found {dtype!r}")
    return _DTYPES[dtype]


@dataclass(frozen=True)
class ModelLimits:
    """What can be known of a checkpoint before its weights are read."""

    vocab_size: int
    max_position_embeddings: int


def read_limits(path: str | Path) -> ModelLimits:
    """From the config of a folder. Raises CheckpointError where `load_model` would for the config alone."""
    config = read_config(Path(path))
    if config.architecture not in supported_architectures():
        from vtoken.models.fallback import read_their_limits

        return ModelLimits(*read_their_limits(config))
    with torch.device("meta"):
        spec = model_class(config.architecture)(config, torch.float32).spec
    return ModelLimits(spec.vocab_size, spec.max_position_embeddings)


def load_model(path: str | Path, dtype: str = "auto", kernels: Kernels = BATCH_INVARIANT) -> CausalLM:
    """Load a Hugging Face checkpoint folder (config.json, safetensors) for inference on the CPU.

    Everything that headers can tell is checked before memory is taken: files whole, each tensor there once and of the
    right shape, none left over. Then tensors are copied one at a time from the mapped file to their place, so the peak
    is one model and one tensor. An architecture without a family goes to `fallback`. Raises CheckpointError with what
    was expected, what was found and what to do.
    """
    config = read_config(Path(path))
    if config.architecture not in supported_architectures():
        from vtoken.models.fallback import load_fallback  # the import of transformers takes a second

        return load_fallback(config, resolve_dtype(dtype), kernels)
    build = partial(model_class(config.architecture), config, resolve_dtype(dtype), kernels)
    with torch.device("meta"):  # shapes without memory: the config may ask for any amount
        outline = build()
    targets = outline.weight_map()
    assert sum(target.view.numel() for target in targets.values()) == outline.num_parameters, "the map has a hole"
    shards = find_shards(config.folder)
    names = _weight_names(config.folder, shards, outline)
    _check_names(config.folder, shards, names, targets, outline.tied_weights())
    try:
        model = build()
    except RuntimeError as error:
        raise CheckpointError(
            f"{config.folder}: {format_bytes(outline.num_weight_bytes)} of weights and the rotary tables of "
            f"{outline.spec.max_position_embeddings} positions (max_position_embeddings) do not fit in memory"
        ) from error
    targets = model.weight_map()
    for shard in shards:
        _fill(shard, names, targets)
    _check_tied(shards, names, targets, model.tied_weights())
    return model.eval()


def _weight_names(folder: Path, shards: list[Shard], model: CausalLM) -> dict[str, str]:
    """Name in the files -> name in the model's maps, of each tensor that matters; no two with one."""
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for shard in shards:
        for stored in shard.shapes:
            name = model.weight_name(stored)
            if name is None:
                continue
            if shard.dtypes[stored] not in FLOATS:
                raise not_a_float(shard.path, stored, shard.dtypes[stored])
            if name in taken:
                raise CheckpointError(
                    f"{folder}: the weights hold {taken[name]!r} and {stored!r}, which are the same tensor"
                )
            names[stored], taken[name] = name, stored
    return names


def _check_names(
    folder: Path, shards: list[Shard], names: dict[str, str], targets: dict[str, WeightTarget], tied: dict[str, str]
) -> None:
    """Every target has its tensor, every tensor its target, and the shapes agree."""
    shapes = {name: shape for shard in shards for name, shape in shard.shapes.items()}
    missing = targets.keys() - set(names.values())
    if missing:
        hint = (
            '; without lm_head.weight the config must say "tie_word_embeddings": true'
            if missing == {"lm_head.weight"}
            else ""
        )
        raise CheckpointError(f"{folder}: {_listing(missing)} missing from the weights{hint}")
    unexpected = {stored for stored, name in names.items() if name not in targets and name not in tied}
    if unexpected:
        raise CheckpointError(
            f"{folder}: {_listing(unexpected)} in the weights, but not in the model that config.json describes"
        )
    for stored, name in names.items():
        if name not in targets:
            continue
        expected = tuple(targets[name].view.shape)
        if shapes[stored] != expected:
            raise CheckpointError(
                f"{folder}: tensor {stored!r} has shape {list(shapes[stored])}, config.json makes it {list(expected)}"
            )


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: safetensors cannot read it ({error}); download it again") from error


def _fill(shard: Shard, names: dict[str, str], targets: dict[str, WeightTarget]) -> None:
    """Copy a file's tensors to their places. Copied, not mapped: torch's own memory is aligned, as kernels like it."""
    with _open(shard.path) as file:
        for stored in shard.shapes:
            target = targets.get(names.get(stored, ""))
            if target is not None:
                target.fill(file.get_tensor(stored))


def _check_tied(
    shards: list[Shard], names: dict[str, str], targets: dict[str, WeightTarget], tied: dict[str, str]
) -> None:
    """A tensor that repeats a tied one must be equal to it; else config and weights contradict each other."""
    for shard in shards:
        for stored_name in shard.shapes:
            name = names.get(stored_name)
            if name not in tied:
                continue
            with _open(shard.path) as file:
                stored = file.get_tensor(stored_name)
            view = targets[tied[name]].view
            if not torch.equal(stored.to(view.dtype), view):
                raise CheckpointError(
                    f"{shard.path}: config.json ties {name!r} to {tied[name]!r}, but the file holds different values "
                    'for them; set "tie_word_embeddings": false to use both'
                )


def _listing(names: set[str]) -> str:
    shown = sorted(names)[:5]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(shown)}{more} {'are' if len(names) > 1 else 'is'}"
