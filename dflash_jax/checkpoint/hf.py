"""Hugging Face checkpoints: folders and hub ids, read without torch."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  safetensors' numpy front end reads bfloat16 only with it
import numpy as np
import safetensors

from dflash_jax.checkpoint.files import TensorInfo, one_line, read_json, token_ids

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_EXPERT = re.compile(r"\.experts\.(\d+)\.(.*)")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"} | {
    f"{k}{n}": f"{'u' * (k == 'U')}int{n}" for k in "IU" for n in (8, 16, 32, 64)
}  # fmt: skip
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
        raise ValueError(f"{str(ref)!r} is neither an existing path nor a hub id like 'org/name'")
    import huggingface_hub
    from huggingface_hub import errors

    # The first base is the HTTP library's own error, whichever library this version builds on.
    network = (OSError, ValueError, errors.HfHubHTTPError.__bases__[0])
    try:
        return Path(
            huggingface_hub.snapshot_download(
                ref, allow_patterns=["*.safetensors", "*.json", *_TOKENIZER_FILES]
            )
        )
    except errors.GatedRepoError as e:
        raise ValueError(
            f"{ref!r} is gated: accept its licence on the hub and log in with `hf auth login`"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise ValueError(
            f"{ref!r} is no local path, and the hub has no such repository (misspelt, or private?)"
        ) from e
    except network as e:
        raise ValueError(
            f"{ref!r} is no local path and could not be fetched from the hub: {one_line(e)}"
        ) from e


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
    for path, names in _files(folder):
        found = set()
        for name, value in _read_file(path):
            found.add(name)
            yield name, value
        _check_index(path, found, names)


def read_infos(folder: Path) -> Iterator[TensorInfo]:
    """Yields the folder's tensors without their values.

    Raises:
        ValueError: As `read_tensors`.
    """
    for path, told in _files(folder):
        with contextlib.ExitStack() as stack:
            file, names = _open(stack, path)
            _check_index(path, set(names), told)
            for name in names:
                part = file.get_slice(name)
                shape, code = tuple(part.get_shape()), part.get_dtype()
                bits = int("".join(filter(str.isdigit, code.split("_")[0])) or 8)  # BOOL has a byte
                nbytes = math.prod(shape) * bits // 8
                yield TensorInfo(name, _DTYPES.get(code, code), shape, nbytes)


def _files(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """The folder's weight files, and which names the index says are in each."""
    if (folder / _WEIGHTS).is_file():
        yield folder / _WEIGHTS, None
        return
    if not (folder / _INDEX).is_file():
        raise ValueError(f"{folder} has neither {_WEIGHTS} nor {_INDEX}")
    for shard, names in _read_index(folder / _INDEX).items():
        if not (folder / shard).is_file():
            raise ValueError(f"{folder / _INDEX} names the shard {shard}, which is missing")
        yield folder / shard, names


def _check_index(path: Path, found: set[str], told: set[str] | None) -> None:
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


def _broken(path: Path, e: Exception) -> ValueError:
    return ValueError(f"{path} is truncated or corrupt: {one_line(e)}")


def _open(stack: contextlib.ExitStack, path: Path) -> tuple[Any, list[str]]:
    """An open file, and the names in it."""
    try:
        file = stack.enter_context(safetensors.safe_open(path, framework="np"))
        return file, list(file.keys())
    except (safetensors.SafetensorError, OSError) as e:
        raise _broken(path, e) from e


def _read_file(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    with contextlib.ExitStack() as stack:
        file, names = _open(stack, path)
        # The experts of one projection one after another, so that they can be stacked.
        names = sorted(names, key=lambda n: _EXPERT.sub(r".experts.\2.\1", n))
        for name in names:
            try:
                value = file.get_tensor(name)
            except (safetensors.SafetensorError, TypeError, AttributeError) as e:
                raise _broken(path, e) from e
            yield name, value


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
