"""Hugging Face checkpoints: folders and hub ids, read without torch."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import safetensors

from dflash_jax.checkpoint import hub
from dflash_jax.checkpoint.files import TensorInfo, one_line, read_json, token_ids

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Of safetensors' dtype names; the eight-bit floats only so that an error can name them.
DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
        "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
    }.items()
}  # fmt: skip
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_EXPERT = re.compile(r"\.experts\.(\d+)\.(.*)")
_TOKENIZER_FILES = ("tokenizer*", "*.model", "*.jinja", "vocab.*", "merges.txt",
                    "special_tokens_map.json", "added_tokens.json")  # fmt: skip


def resolve(ref: str | Path) -> Path:
    """The local path of a checkpoint: an existing path as it is, else a hub id (`org/name`), downloaded.

    Raises:
        ValueError: If it is neither, or the hub does not give it (offline, gated, misspelt).
    """
    path = Path(ref).expanduser()
    if path.exists():
        return path
    if not isinstance(ref, str) or not _HUB_ID.fullmatch(ref) or path.suffix == ".gguf":
        near = hub.did_you_mean(ref) if isinstance(ref, str) and path.suffix != ".gguf" else ""
        raise ValueError(
            f"{str(ref)!r} is neither an existing path nor a hub id like 'org/name'{near}"
        )
    return hub.fetch(ref, ["*.safetensors", "*.json", *_TOKENIZER_FILES])


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        ValueError: If it is missing or unreadable.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json, so it is no checkpoint")
    return read_json(folder / "config.json")


def is_draft(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is a draft's."""
    names = config.get("architectures")
    names = names if isinstance(names, list) else ()
    return any(key in config for key in ("dflash_config", "speculators_model_type")) or any(
        family in str(name) for name in names for family in ("DFlash", "Domino", "DSpark")
    )


def read_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of `model.safetensors`, or of every shard of the index, one tensor at a time.

    Raises:
        ValueError: If a file is missing, truncated or corrupt, or the index and the shards disagree.
    """
    for path, told in _files(folder):
        _check_index(path, read_header(path).keys(), told)
        yield from _read_file(path)


def map_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """`read_tensors` without reading: the arrays are views of mapped files, read where they are used.

    Raises:
        ValueError: As `read_tensors`.
    """
    for path, told in _files(folder):
        header = read_header(path)
        _check_index(path, header.keys(), told)
        mapped = np.asarray(np.memmap(path, np.uint8, "r"))
        for name, e in header.items():
            end = e.offset + math.prod(e.shape) * e.dtype.itemsize
            yield name, mapped[e.offset : end].view(e.dtype).reshape(e.shape)


def read_infos(folder: Path) -> Iterator[TensorInfo]:
    """Yields the folder's tensors without their values.

    Raises:
        ValueError: As `read_tensors`.
    """
    for path, told in _files(folder):
        header = read_header(path)
        _check_index(path, header.keys(), told)
        for name, e in header.items():
            yield TensorInfo(name, e.dtype.name, e.shape, math.prod(e.shape) * e.dtype.itemsize)


def _files(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """The folder's weight files, and which names the index says are in each."""
    if (folder / WEIGHTS).is_file():
        yield folder / WEIGHTS, None
        return
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
    for shard, names in _read_index(folder / INDEX).items():
        if not (folder / shard).is_file():
            raise ValueError(f"{folder / INDEX} names the shard {shard}, which is missing")
        yield folder / shard, names


def _check_index(path: Path, found: Set[str], told: Set[str] | None) -> None:
    if told is not None and found != told:
        raise ValueError(f"{path} and its index disagree about {sorted(found ^ told)}")


def _read_index(path: Path) -> dict[str, set[str]]:
    """Tensor names of each shard."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} has no weight_map")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{path} names {shard!r} as a shard, which is no file name")
        shards.setdefault(shard, set()).add(name)
    return shards


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor's dtype, shape, and first byte in its safetensors file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> dict[str, Entry]:
    """What a safetensors file holds, by name, without the values.

    Raises:
        ValueError: If the file is truncated or corrupt, or holds a dtype without a numpy name.

    Source: https://github.com/huggingface/safetensors#format.
    """
    try:
        with safetensors.safe_open(path, framework="np"):
            pass  # checks the header, and that the tensors fill the file
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (safetensors.SafetensorError, OSError, ValueError) as e:
        raise ValueError(f"{path} is truncated or corrupt: {one_line(e)}") from e
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} has the unsupported dtype {entry['dtype']}")
    return {
        name: Entry(DTYPES[e["dtype"]], tuple(e["shape"]), 8 + size + e["data_offsets"][0])
        for name, e in header.items()
    }


def _read_file(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    header = read_header(path)
    with path.open("rb") as file:
        # The experts of one projection one after another, so that they can be stacked.
        for name in sorted(header, key=lambda n: _EXPERT.sub(r".experts.\2.\1", n)):
            yield name, _read_tensor(file, header[name])


def _read_tensor(file: BinaryIO, entry: Entry) -> np.ndarray:
    """One tensor by a plain read: pages of a mapped file would count as memory in use."""
    value = np.empty(entry.shape, entry.dtype)
    file.seek(entry.offset)
    if file.readinto(value.reshape(-1).view(np.uint8)) != value.nbytes:  # pyrefly: ignore
        raise ValueError(f"{file.name} was cut short while it was read")
    return value


def read_stop_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The stop ids of `generation_config.json`, or else of the config; maybe none.

    Raises:
        ValueError: If they are not ids.
    """
    path = folder / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = config.get("eos_token_id") if ids is None else ids
    return token_ids([] if ids is None else ids if isinstance(ids, list) else [ids], folder)


def tokenizer_files(folder: Path) -> list[Path]:
    """The folder's tokenizer files."""
    return sorted({p for pattern in _TOKENIZER_FILES for p in folder.glob(pattern) if p.is_file()})


def load_tokenizer(folder: Path):
    """The folder's tokenizer, by transformers.

    Raises:
        ValueError: If there is none that transformers can read.
    """
    from transformers import AutoTokenizer

    if not tokenizer_files(folder):
        raise ValueError(f"{folder} has no tokenizer files")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{folder} has no readable tokenizer: {one_line(e)}") from e
