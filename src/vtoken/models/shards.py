"""Find and check the safetensors files of a checkpoint before a byte of weights is read. No torch.

A safetensors file is: 8 bytes little-endian header length, a JSON header with each tensor's dtype, shape and byte
range, then the data (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

from vtoken.base.errors import CheckpointError
from vtoken.base.validation import shorten
from vtoken.models.json_object import parse_json_object, read_json_object

logger = logging.getLogger(__name__)

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"

# The floating-point formats that weights may be stored in, with bytes an element, and what masks and tables come in.
FLOATS: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DTYPE_BYTES: Final = {**FLOATS, "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8}

_LFS_MARK: Final = b"version https://git-lfs"
_MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the format


@dataclass(frozen=True)
class Shard:
    """One safetensors file that is as long as its header says."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]  # tensor name -> shape
    dtypes: Mapping[str, str]  # tensor name -> format, as safetensors names it


def find_shards(folder: Path) -> list[Shard]:
    """The checked weight files of a folder: the single file, or those of the index.

    With both, the single file, as in transformers, unless it is one of the index's. Raises CheckpointError if a file is
    missing, short, long, unreadable, a git-LFS pointer, or holds a tensor twice.
    """
    index_path, single_path = folder / INDEX_NAME, folder / SINGLE_NAME
    weight_map = _read_index(index_path) if index_path.is_file() else None
    if single_path.is_file() and (weight_map is None or SINGLE_NAME not in weight_map.values()):
        if weight_map is not None:
            logger.warning(
                "%s: %s is loaded, as transformers does; the shards of %s are ignored", folder, SINGLE_NAME, INDEX_NAME
            )
        return [read_shard(single_path)]
    if weight_map is not None:
        return _indexed_shards(folder, weight_map)
    found = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    if found:
        raise CheckpointError(
            f"{folder}: expected {SINGLE_NAME} or {INDEX_NAME}, found only PyTorch pickles ({found[0]}), which can run "
            "code when they are read; convert them once with transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(<new folder>)"
        )
    raise CheckpointError(f"{folder}: no weights; expected {SINGLE_NAME} or {INDEX_NAME} with its shards")


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path}: expected a 'weight_map' of file names, found {shorten(weight_map)}")
    return weight_map


def _indexed_shards(folder: Path, weight_map: dict[str, str]) -> list[Shard]:
    file_names = sorted(set(weight_map.values()))
    missing = [name for name in file_names if not _is_file(folder / name)]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(file_names)} shards named in {INDEX_NAME} are missing: "
            f"{', '.join(missing if len(missing) <= 5 else [*missing[:5], '...'])}; download them again"
        )
    home: dict[str, str] = {}  # tensor name -> file name
    shards = []
    for file_name in file_names:
        shard = read_shard(folder / file_name)
        for name in shard.shapes:
            if name in home:
                raise CheckpointError(f"{folder}: tensor {name!r} is in both {home[name]} and {file_name}")
            home[name] = file_name
        shards.append(shard)
    for name, file_name in weight_map.items():
        if home.get(name) != file_name:
            raise CheckpointError(
                f"{folder / INDEX_NAME}: tensor {name!r} should be in {file_name}, but is in "
                f"{home.get(name, 'no shard')}"
            )
    return shards


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long to exist
        return False


def read_shard(path: Path) -> Shard:
    """Read a file's header, check that its tensors fill the file, and hold the file's size against it."""
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
            text = file.read(header_size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    header = parse_json_object(text, f"{path}: safetensors header")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise CheckpointError(f"{path}: safetensors header: '__metadata__' must map names to strings")
    tensors = {name: _read_tensor(path, name, entry) for name, entry in header.items()}
    expected = 8 + header_size + _end_of_data(path, tensors)
    if size != expected:
        raise CheckpointError(
            f"{path} is {'short' if size < expected else 'too long'}: its header says {expected} bytes, found {size}; "
            "download it again"
        )
    return Shard(
        path,
        {name: tensor.shape for name, tensor in tensors.items()},
        {name: tensor.dtype for name, tensor in tensors.items()},
    )


class _Tensor(NamedTuple):
    start: int  # its bytes are [start, end) of the data
    end: int
    shape: tuple[int, ...]
    dtype: str


def _read_tensor(path: Path, name: str, entry: object) -> _Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]} if all(
            type(number) is int and number >= 0 for number in (*shape, start, end)
        ):
            pass
        case _:
            raise CheckpointError(
                f"{path}: safetensors header: tensor {name!r} must have a dtype, a shape and two data_offsets, all "
                f"integers >= 0, found {shorten(entry)}"
            )
    if dtype not in _DTYPE_BYTES:
        raise not_a_float(path, name, dtype)
    if prod(shape) * _DTYPE_BYTES[dtype] != end - start:
        raise CheckpointError(f"{path}: tensor {name!r} of shape {shape} in {dtype} cannot take {end - start} bytes")
    return _Tensor(start, end, tuple(shape), dtype)


def not_a_float(path: Path, name: str, dtype: str) -> CheckpointError:
    """The error for a weight stored in a format that is none for weights."""
    return CheckpointError(
        f"{path}: tensor {name!r} is stored as {dtype}; supported are {', '.join(FLOATS)} (quantised checkpoints "
        "cannot be served)"
    )


def _end_of_data(path: Path, tensors: Mapping[str, _Tensor]) -> int:
    """Bytes of all tensors, which must lie one behind the other: a hole or an overlap is damage."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1]):
        if tensor.start != end:
            raise CheckpointError(
                f"{path}: safetensors header: tensor {name!r} starts at byte {tensor.start}, expected {end} (no "
                "gap, no overlap); download it again"
            )
        end = tensor.end
    return end
