"""Writes Hugging Face tensors as they come, and tells how many bytes have.

Both converters read a leaf, write it and forget it: `pair.open_target` or `orbax.stream` gives the
leaves, `orbax.write` or `write_safetensors` takes them.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from dflash_jax.checkpoint import keys
from dflash_jax.checkpoint.files import write_json
from dflash_jax.checkpoint.hf import DTYPES, INDEX, WEIGHTS
from dflash_jax.config import DraftConfig, TargetConfig

SHARD_BYTES = 5 * 10**9  # as transformers writes them
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Leaves = Iterable[tuple[str, Any]]
Progress = Callable[[int, int], None] | None  # told the bytes so far, and of how many


def write_tensors(
    folder: Path,
    leaves: Leaves,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Callable[[Leaves], Leaves],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes leaves as the tensors that `tensors` makes of them.

    Args:
        folder: Exists; see `write_safetensors` for the files.
        leaves: Pairs (path, array), of `orbax.stream` for example.
        shapes: Of the leaves, by path.
        tensors: From pairs (path, leaf) to pairs (Hugging Face name, array), for example `export.tensors`;
            names, shapes and dtypes must not depend on the values.
    """
    # Arrays of one element stand for the leaves, so the files' headers are known before any is read.
    blanks = ((path, keys.blank(x.shape, x.dtype)) for path, x in shapes.items())
    expected = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tensors(blanks)}
    write_safetensors(folder, expected, tensors(leaves), shard_bytes)


def write_safetensors(
    folder: Path,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Leaves,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes `model.safetensors`, or above `shard_bytes` shards and their index.

    Args:
        folder: Exists.
        shapes: Of every tensor, by name; shards are filled in this order.
        tensors: Pairs (name, array) in any order, each written and forgotten.
        shard_bytes: At most, of a shard that holds more than one tensor.

    Raises:
        ValueError: If a tensor is not in `shapes`, is there twice or not at all, or has another shape
            or dtype.

    Source: https://github.com/huggingface/safetensors#format; shards as transformers writes them.
    """
    shards = _divide(shapes, shard_bytes)
    files = [WEIGHTS] if len(shards) == 1 else [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        places: dict[str, tuple[BinaryIO, int]] = {}
        for file, names in zip(files, shards):
            opened = stack.enter_context((folder / file).open("wb"))
            places |= _begin(opened, {name: shapes[name] for name in names})
        for name, value in tensors:
            wanted = shapes.get(name)
            if name not in places or wanted is None:
                raise ValueError(f"{name} is not to be written, or is there twice")
            if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
                raise ValueError(
                    f"{name} is {value.dtype}{list(value.shape)}, expected {wanted.dtype}{list(wanted.shape)}"
                )
            file, offset = places.pop(name)
            file.seek(offset)
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            del value  # not held while the next is read
        if places:
            raise ValueError(f"missing tensors: {', '.join(n for n in shapes if n in places)}")
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards) for name in names}
        total = sum(map(_nbytes, shapes.values()))
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _divide(shapes: Mapping[str, jax.ShapeDtypeStruct], shard_bytes: int) -> list[list[str]]:
    """The names of each shard."""
    shards, size = [[]], 0
    for name, leaf in shapes.items():
        if shards[-1] and size + _nbytes(leaf) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _nbytes(leaf)
    return shards


def _begin(
    file: BinaryIO, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, tuple[BinaryIO, int]]:
    """Writes a file's header; returns where each tensor goes.

    As the safetensors library has it, wide dtypes come first and the header ends at a multiple of 8
    bytes, so every tensor is aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, starts = 0, {}
    for name in sorted(shapes, key=lambda n: -shapes[n].dtype.itemsize):
        leaf = shapes[name]
        starts[name], end = end, end + _nbytes(leaf)
        header[name] = {
            "dtype": _NAMES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [starts[name], end]
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    return {name: (file, 8 + len(text) + start) for name, start in starts.items()}


def watched(leaves: Leaves, config: TargetConfig | DraftConfig, progress: Progress) -> Leaves:
    """Passes a model's leaves on, and tells after each how many bytes of them there were; see `Progress`."""
    return leaves if progress is None else _told(leaves, config, progress)


def _told(
    leaves: Leaves, config: TargetConfig | DraftConfig, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, Any]]:
    left, done = sum(map(math.prod, keys.expected_shapes(config).values())), 0
    for path, leaf in leaves:
        yield path, leaf
        left, done = left - leaf.size, done + _nbytes(leaf)
        progress(done, done + left * leaf.dtype.itemsize)
        del leaf  # not held while the next is read
