"""Find and check the safetensors files of a checkpoint before a byte of weights is read. No torch.

A safetensors file is: 8 bytes little-endian header length, a JSON header with each tensor's dtype, shape and byte
range, then the data (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from vtoken.base.errors import CheckpointError

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"

# The floating-point formats that weights may be stored in, with bytes an element.
_DTYPE_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

_LFS_MARK: Final = b"version https://git-lfs"
_MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the format


@dataclass(frozen=True)
class Shard:
    """One safetensors file that is as long as its header says."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]  # tensor name -> shape


def find_shards(folder: Path) -> list[Shard]:
    """The checked weight files of a folder: those of the index if there is one, or the single file.

    Raises CheckpointError if a file is missing, short, long, unreadable, a git-LFS pointer, or holds a tensor twice.
    """
    index_path, single_path = folder / INDEX_NAME, folder / SINGLE_NAME
    if index_path.is_file():
        return _indexed_shards(folder, index_path)
    if single_path.is_file():
        return [read_shard(single_path)]
    found = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    if found:
        raise CheckpointError(
            f"{folder}: expected {SINGLE_NAME} or {INDEX_NAME}, found only PyTorch pickles ({found[0]}), which can run "
            "code when they are read; convert them once with transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(<new folder>)"
        )
    raise CheckpointError(f"{folder}: no weights; expected {SINGLE_NAME} or {INDEX_NAME} with its shards")


def _indexed_shards(folder: Path, index_path: Path) -> list[Shard]:
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        file_names = sorted(set(weight_map.values()))
        paths = [folder / name for name in file_names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index_path}: expected a JSON object with a 'weight_map' of file names ({error!r})"
        ) from error
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(paths)} shards named in {INDEX_NAME} are missing: {', '.join(missing)}; "
            "download them again"
        )
    shards = [read_shard(path) for path in paths]
    home: dict[str, str] = {}  # tensor name -> file name
    for shard in shards:
        for name in shard.shapes:
            if name in home:
                raise CheckpointError(f"{folder}: tensor {name!r} is in both {home[name]} and {shard.path.name}")
            home[name] = shard.path.name
    for name, file_name in weight_map.items():
        if home.get(name) != file_name:
            raise CheckpointError(
                f"{index_path}: tensor {name!r} should be in {file_name}, but is in {home.get(name, 'no shard')}"
            )
    return shards


def read_shard(path: Path) -> Shard:
    """Read a file's header and hold the file's size against it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if (start + file.read(len(_LFS_MARK) - 8)).startswith(_LFS_MARK):
                raise CheckpointError(
                    f"{path} is a git-LFS pointer ({size} bytes of text), not the weights; run `git lfs pull` in its "
                    "repository or download the file itself"
                )
            header_size = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= header_size <= _MAX_HEADER_BYTES or 8 + header_size > size:
                raise CheckpointError(
                    f"{path} is not a whole safetensors file: it has {size} bytes, its header should have {header_size}"
                )
            file.seek(8)
            header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        shapes = {name: _checked_shape(path, name, entry) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path}: the safetensors header cannot be read ({error!r})") from error
    expected = 8 + header_size + end
    if size != expected:
        raise CheckpointError(
            f"{path} is {'short' if size < expected else 'too long'}: its header says {expected} bytes, found {size}; "
            "download it again"
        )
    return Shard(path, shapes)


def _checked_shape(path: Path, name: str, entry: Mapping[str, Any]) -> tuple[int, ...]:
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in _DTYPE_BYTES:
        raise CheckpointError(
            f"{path}: tensor {name!r} is stored as {dtype}; supported are {', '.join(_DTYPE_BYTES)} (quantised "
            "checkpoints cannot be served)"
        )
    if prod(shape) * _DTYPE_BYTES[dtype] != end - start:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {list(shape)} in {dtype} cannot take {end - start} bytes"
        )
    return shape
