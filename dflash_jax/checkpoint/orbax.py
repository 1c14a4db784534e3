"""Our own checkpoints: an Orbax directory of the plain parameter dict beside a `config.json`.

    config.json     {"format": "dflash-jax", "version": 1, "kind": "target" | "draft", "config": {...}, ...}
    params/         Orbax (v1) pytree, readable without this package or Flax
    tokenizer*      the source's tokenizer files, if given

Shapes come from the config, so a checkpoint restores on any number of devices.
"""

import contextlib
import ctypes
import dataclasses
import gc
import math
import shutil
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dflash_jax import array_typing as at
from dflash_jax.checkpoint import keys
from dflash_jax.checkpoint.files import (
    TensorInfo,
    atomic_folder,
    one_line,
    pad_id,
    read_json,
    token_ids,
    write_json,
)
from dflash_jax.config import (
    DFlash2,
    Domino,
    DraftConfig,
    DSpark,
    MoeConfig,
    RopeConfig,
    TargetConfig,
)
from dflash_jax.config.fields import build

_FORMAT, _VERSION = "dflash-jax", 1
_CONFIGS = {"target": TargetConfig, "draft": DraftConfig}
_HEADS = {cls.__name__: cls for cls in (DFlash2, Domino, DSpark)}
Config = TypeVar("Config", bound=TargetConfig | DraftConfig)
_GROUP = 2**27  # bytes of leaves that are read or written in one call
_CHUNK = 2**26  # bytes of a stored array that are read at once


@dataclasses.dataclass(frozen=True)
class Header(Generic[Config]):
    """What a checkpoint's `config.json` says.

    Attributes:
        kind: "target" or "draft".
        config: The model's shape.
        stop_token_ids: A target's; empty for drafts.
        pad_token_id: A target's, if it has one.
    """

    kind: Literal["target", "draft"]
    config: Config
    stop_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None


def save(
    directory: str | Path,
    kind: Literal["target", "draft"],
    config: TargetConfig | DraftConfig,
    params: at.Params,
    *,
    stop_token_ids: Sequence[int] = (),
    pad_token_id: int | None = None,
    tokenizer_files: Sequence[Path] = (),
) -> None:
    """Writes a checkpoint; the directory appears whole or not at all.

    Args:
        directory: Must not exist.
        kind: Must be `config`'s.
        params: Any float dtype; kept bit for bit.
        tokenizer_files: Copied beside the parameters.

    Raises:
        ValueError: If the directory exists, or the parameters are not the config's.
    """
    keys.check_params(params, config, "the parameters to save")
    header = Header(kind, config, tuple(stop_token_ids), pad_token_id)
    write(directory, header, keys.flatten(params).items(), tokenizer_files)


def write(
    directory: str | Path,
    header: Header,
    leaves: Iterable[tuple[str, Any]],
    tokenizer_files: Sequence[Path] = (),
) -> None:
    """Writes a checkpoint a few leaves at a time; the directory appears whole or not at all.

    Args:
        directory: Must not exist.
        leaves: Pairs (path, numpy or JAX array), all that `header.config` asks for, already checked
            (`keys.stream`, `keys.checked`); kept bit for bit. At most the largest and 256 MiB of the
            others are held.

    Raises:
        ValueError: If the directory exists, the kind is not the config's, or `leaves` raises it.
    """
    if not isinstance(header.config, _CONFIGS.get(header.kind, ())):
        raise ValueError(f"kind={header.kind!r} does not fit a {type(header.config).__name__}")
    with atomic_folder(directory) as folder:
        _write_params(folder / "params", leaves)
        for file in tokenizer_files:
            shutil.copyfile(file, folder / file.name)
        write_json(
            folder / "config.json",
            {
                "format": _FORMAT,
                "version": _VERSION,
                "kind": header.kind,
                "config": plain(header.config),
                "stop_token_ids": list(header.stop_token_ids),
                "pad_token_id": header.pad_token_id,
            },
        )


def _write_params(folder: Path, leaves: Iterable[tuple[str, Any]]) -> None:
    from orbax.checkpoint import v1 as ocp

    def write_group(group: dict[str, Any]) -> None:
        with _options():
            tree: Any = keys.nest(group)
            ocp.partial.save(str(folder), tree)

    # In another thread, so that an interrupt never cuts a write short: leaving the pool waits for it,
    # and nobody writes to a folder that is being removed.
    with ThreadPoolExecutor(1) as pool:
        for group in _groups(leaves):
            pool.submit(write_group, group).result()
            del group
            _free_memory()
        pool.submit(ocp.partial.finalize, str(folder)).result()
    mark = folder / "commit_success.txt"  # where Orbax names the folder, which a checkpoint leaves
    if mark.exists():
        mark.write_text("")


def _groups(leaves: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    """Leaves, or what stands for them, by path: `_GROUP` bytes at most, or one that is larger."""
    group, size = {}, 0
    for path, leaf in leaves:
        nbytes = _nbytes(leaf)
        if group and size + nbytes > _GROUP:
            yield group
            group, size = {}, 0
        group[path], size = leaf, size + nbytes
        del leaf  # not held while the next is read
        if size >= _GROUP:  # nor is a large one
            yield group
            group, size = {}, 0
    if group:
        yield group


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


@contextlib.contextmanager
def _options() -> Generator[None]:
    """How we have Orbax read and write.

    Weights hardly compress, and uncompressed chunks are written from where they are. Reading an array
    holds one chunk beside it.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK
    context.memory.deepcopy_host_arrays = False  # nobody changes them: each call is waited for
    context.pytree.loading.partial_load = True
    with context:
        yield


def is_checkpoint(directory: Path) -> bool:
    """Whether a folder is one of ours."""
    path = directory / "config.json"
    return path.is_file() and read_json(path).get("format") == _FORMAT


def read_header(directory: Path) -> Header:
    """What a checkpoint is, without its parameters.

    Raises:
        ValueError: If the directory is none of ours, or of another version.
    """
    path = directory / "config.json"
    value = read_json(path)
    if value.get("format") != _FORMAT:
        raise ValueError(f"{path}: format={value.get('format')!r} must be {_FORMAT!r}")
    if value.get("version") != _VERSION:
        raise ValueError(f"{path}: version={value.get('version')!r} must be {_VERSION}")
    kind = value.get("kind")
    if kind not in _CONFIGS:
        raise ValueError(f"{path}: kind={kind!r} must be one of {sorted(_CONFIGS)}")
    try:
        config = config_of(_CONFIGS[kind], value["config"])
        stop, pad = token_ids(value["stop_token_ids"]), pad_id(value)
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{path} is not a complete config: {one_line(e)}") from e
    return Header(kind, config, stop, pad)


def load(
    directory: str | Path, dtype: DTypeLike | None = None, sharding: keys.Placement = None
) -> tuple[Header, at.Params]:
    """What a checkpoint is, and its parameters.

    Args:
        directory: Written by `save`, on any number of devices.
        dtype: Of the parameters; None for the stored one.
        sharding: Of all leaves, or of each by its path and shape; each device reads its own part.
            None is the first device.

    Raises:
        ValueError: If the directory is none of ours, incomplete or corrupt.
    """
    header = read_header(Path(directory))
    return header, load_params(Path(directory), header.config, dtype, sharding)


def load_params(
    directory: Path,
    config: TargetConfig | DraftConfig,
    dtype: DTypeLike | None = None,
    sharding: keys.Placement = None,
) -> at.Params:
    """The parameters of a checkpoint, which must be `config`'s. See `load`."""
    leaves = stream(directory, config, dtype, sharding)
    return keys.build(leaves, keys.expected_shapes(config))


def stream(
    directory: Path,
    config: TargetConfig | DraftConfig,
    dtype: DTypeLike | None = None,
    sharding: keys.Placement = None,
) -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf) of a checkpoint, which must be `config`'s. See `read_leaves`."""
    folder = Path(directory) / "params"
    stored = read_shapes(folder)
    found = {path: leaf.shape for path, leaf in stored.items()}
    keys.check_shapes(found, keys.expected_shapes(config), directory)
    yield from keys.checked(read_leaves(folder, stored, dtype, sharding), config, directory)


def read_shapes(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every array in a folder written by Orbax, by path.

    Raises:
        ValueError: If the folder is not readable, or holds no arrays.
    """
    from orbax.checkpoint import v1 as ocp

    with _readable(folder):
        metadata: Any = ocp.metadata(str(folder.absolute())).metadata
        leaves = keys.flatten(metadata)
        if not leaves:
            raise ValueError("it holds no readable parameters")
        return {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in leaves.items()}


def read_leaves(
    folder: Path,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    dtype: DTypeLike | None = None,
    sharding: keys.Placement = None,
) -> Iterator[tuple[str, Any]]:
    """Yields (path, array) of leaves of a folder written by Orbax, largest first; no others are read.

    At most the largest and 256 MiB of the others are held.

    Args:
        wanted: Those of `read_shapes` to read.
        dtype: Of leaves that are not integers; None for the stored one.
        sharding: See `load`; None gives numpy arrays.

    Raises:
        ValueError: If the folder is not readable.
    """
    from orbax.checkpoint import v1 as ocp

    def abstract(path: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | np.ndarray:
        kept = _kept(leaf.dtype, dtype)
        place = keys.sharding_of(path, leaf.shape, sharding)
        if place is None:
            return keys.blank(leaf.shape, kept)  # asks for a numpy array
        return jax.ShapeDtypeStruct(leaf.shape, kept, sharding=place)

    # What Orbax's threads have freed is not all given back: the largest come while that is little.
    order = sorted(wanted.items(), key=lambda item: -_nbytes(item[1]))
    for group in _groups((path, abstract(path, leaf)) for path, leaf in order):
        _free_memory()
        asked: Any = keys.nest(group)
        with _readable(folder), _options():
            tree: Any = ocp.load(str(folder.absolute()), asked)
        leaves = keys.flatten(tree)
        del tree
        for path in group:
            yield path, leaves.pop(path)


def _free_memory() -> None:
    """Gives back what the last call held: Orbax leaves cycles, and glibc keeps what its threads freed."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def read_infos(directory: Path) -> Iterator[TensorInfo]:
    """Yields a checkpoint's parameters, named by their paths, without their values.

    Raises:
        ValueError: If they cannot be read.
    """
    for path, leaf in read_shapes(directory / "params").items():
        nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize
        yield TensorInfo(path, leaf.dtype.name, leaf.shape, nbytes)


def read_tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path, value) of a checkpoint's parameters, as they are.

    Raises:
        ValueError: If they cannot be read.
    """
    folder = directory / "params"
    yield from read_leaves(folder, read_shapes(folder))


@contextlib.contextmanager
def _readable(folder: Path) -> Generator[None]:
    """Turns Orbax's errors into one line that names the folder."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{folder} is not a readable Orbax checkpoint: {one_line(e)}") from e


def _kept(stored: DTypeLike, wanted: DTypeLike | None) -> DTypeLike:
    """The dtype to load a leaf in: ids stay integers."""
    return stored if wanted is None or jnp.issubdtype(stored, jnp.integer) else wanted


def config_of(cls: type[Config], plain: Mapping[str, Any]) -> Config:
    """The config that `plain` made JSON of.

    Raises:
        KeyError, TypeError, ValueError: If something is missing, unknown or wrong.
    """
    fields = dict(plain)
    given: dict[str, Any] = {"rope": _build(RopeConfig, fields["rope"])}
    if fields.get("moe") is not None:
        given["moe"] = _build(MoeConfig, fields["moe"])
    if fields.get("head") is not None:
        head = dict(fields["head"])
        given["head"] = _build(_HEADS[head.pop("type")], head)
    return _build(cls, fields, **given)


def plain(config: TargetConfig | DraftConfig) -> dict[str, Any]:
    """A config as JSON; a head names its type."""
    fields = dataclasses.asdict(config)
    if fields.get("head") is not None and isinstance(config, DraftConfig):
        fields["head"]["type"] = type(config.head).__name__
    return fields


def _build(cls: type, fields: Mapping[str, Any], **given: Any) -> Any:
    values = {**fields, **given}
    return build(cls, {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
