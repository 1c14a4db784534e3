"""A GGUF file: its metadata, where its tensors are, and their values.

The header is parsed here: the gguf package's reader makes an object of every token and merge,
which takes longer than reading the weights. The package's block formats are used as they are.
"""

import dataclasses
import functools
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.checkpoint.files import one_line

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_JOINED = 2**13  # elements


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor's place in the file; `shape` is numpy's, so the last axis is contiguous."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclasses.dataclass(frozen=True)
class File:
    path: Path
    start: int  # of the tensors' bytes
    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]

    def get(self, key: str) -> Any:
        """A value that must be there."""
        if key not in self.metadata:
            raise ValueError(f"the GGUF metadata lacks {key}")
        return self.metadata[key]


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, buffer: mmap.mmap):
        self.buffer, self.at = buffer, 0

    def take(self, code: str, count: int = 1) -> tuple:
        fmt = f"<{count}{code}"
        values = struct.unpack_from(fmt, self.buffer, self.at)
        self.at += struct.calcsize(fmt)
        return values

    def one(self, code: str) -> Any:
        return self.take(code)[0]

    def string(self) -> str:
        size = self.one("Q")
        end = self.at + size
        if end > len(self.buffer):
            raise ValueError(f"a string of {size} bytes reaches past the end")
        text = self.buffer[self.at : end].decode("utf-8")
        self.at = end
        return text

    def value(self) -> Any:
        kind = self.one("I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.one(_SCALARS[kind])
        kind, count = self.one("I"), self.one("Q")
        if count > len(self.buffer) - self.at:
            raise ValueError(f"an array of {count} values reaches past the end")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return list(self.take(_SCALARS[kind], count))


def open_file(path: Path) -> File:
    """The parsed header; the newest one is kept, while the file is unchanged.

    Raises:
        ValueError: For an unreadable file.
    """
    try:
        stat = path.stat()
        return _parse(path, stat.st_mtime_ns, stat.st_size)
    except KeyError as e:
        raise ValueError(f"{path} is not a readable GGUF file: unknown value type {e}") from e
    except (OSError, ValueError, TypeError, struct.error, OverflowError, MemoryError) as e:
        raise ValueError(f"{path} is not a readable GGUF file: {one_line(e)}") from e


@functools.lru_cache(maxsize=1)
def _parse(path: Path, mtime: int, size: int) -> File:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        return File(path, *_parse_header(buffer))


def _parse_header(buffer: mmap.mmap) -> tuple[int, dict[str, Any], tuple[Tensor, ...]]:
    """The first byte of the tensors, the metadata, and where each tensor is."""
    cursor = _Cursor(buffer)
    magic, version = buffer[:4], None
    if magic == b"GGUF":
        cursor.at = 4
        version = cursor.one("I")
    if version not in (2, 3):
        raise ValueError(f"magic {magic!r} and version {version} are not b'GGUF' and 2 or 3")
    tensor_count, entries = cursor.take("Q", 2)
    metadata = {}
    for _ in range(entries):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"the metadata has {key!r} twice")
        metadata[key] = cursor.value()
    tensors = []
    for _ in range(tensor_count):
        name = cursor.string()
        shape = cursor.take("Q", cursor.one("I"))[::-1]
        kind, offset = cursor.one("I"), cursor.one("Q")
        tensors.append(Tensor(name, shape, kind, offset))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment < 2**16:
        raise ValueError(f"general.alignment={alignment!r} is not in [1, {2**16})")
    start = -(-cursor.at // alignment) * alignment
    if start > len(buffer):
        raise ValueError(f"it ends at byte {len(buffer)}, before its tensors")
    _check_places(tensors, len(buffer) - start, alignment)
    return start, metadata, tuple(tensors)


def _check_places(tensors: list[Tensor], size: int, alignment: int) -> None:
    """Raises ValueError unless the tensors fill the file, one after another, as every writer leaves them.

    Otherwise a wrong offset or format would be read as another tensor's values.
    """
    end = 0
    for t in tensors:
        if t.offset != end:
            raise ValueError(f"tensor {t.name!r} starts at {t.offset}, not at {end}")
        stop = end + nbytes_of(t)
        end = -(-stop // alignment) * alignment
        if stop > size:
            raise ValueError(f"tensor {t.name!r} ends {stop - size} bytes past the end of the file")
    if end < size:
        raise ValueError(f"its tensors end {size - end} bytes before the file does")


def nbytes_of(tensor: Tensor) -> int:
    block, size = kind_of(tensor)[1:]
    return math.prod(tensor.shape) // block * size


def kind_of(tensor: Tensor) -> tuple[Any, int, int]:
    """A tensor's block format, with a block's values and bytes.

    Raises:
        ValueError: If the format is unknown, or the tensor no whole number of blocks.
    """
    try:
        import gguf
    except ImportError as e:
        raise ValueError("reading GGUF needs the gguf package: pip install gguf") from e
    kind = gguf.GGMLQuantizationType(tensor.kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if not tensor.shape or tensor.shape[-1] % block:
        raise ValueError(f"shape {list(tensor.shape)} is no whole number of {kind.name} blocks")
    return kind, block, size


def load(file: File, tensor: Tensor) -> np.ndarray:
    """A tensor's values in float32.

    Raises:
        ValueError: If its block format cannot be read.
    """
    import gguf

    kind = kind_of(tensor)[0]
    # A plain read: pages of a mapped file would count as memory in use.
    data = np.fromfile(file.path, np.uint8, nbytes_of(tensor), offset=file.start + tensor.offset)
    rows = data.reshape(*tensor.shape[:-1], -1)
    if kind == gguf.GGMLQuantizationType.F32:
        return rows.view(np.float32)
    if kind == gguf.GGMLQuantizationType.F16:
        return rows.view(np.float16).astype(np.float32)
    # gguf takes 16 rows at a time, which is little work of short rows: joined, they take half the time.
    joined = math.gcd(len(data) // rows.shape[-1], 1 << (_JOINED // tensor.shape[-1]).bit_length())
    values = gguf.dequantize(rows.reshape(-1, joined * rows.shape[-1]), kind)
    return values.reshape(tensor.shape).astype(np.float32, copy=False)
