"""Our own checkpoints: an Orbax directory of the plain parameter dict beside a `config.json`.

    config.json     {"format": "dflash-jax", "version": 1, "kind": "target" | "draft", "config": {...}, ...}
    params/         Orbax (v1) pytree, readable without this package or Flax
    tokenizer*      the source's tokenizer files, if given

Shapes come from the config, so a checkpoint restores on any number of devices.
"""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

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


@dataclasses.dataclass(frozen=True)
class Header:
    """What a checkpoint's `config.json` says.

    Attributes:
        kind: "target" or "draft".
        config: The model's shape.
        stop_token_ids: A target's; empty for drafts.
        pad_token_id: A target's, if it has one.
    """

    kind: Literal["target", "draft"]
    config: TargetConfig | DraftConfig
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
    from orbax.checkpoint import v1 as ocp

    if not isinstance(config, _CONFIGS.get(kind, ())):
        raise ValueError(f"{kind=} does not fit a {type(config).__name__}")
    keys.check_params(params, config, "the parameters to save")
    with atomic_folder(directory) as folder:
        tree: Any = keys.nest(keys.flatten(params))
        ocp.save(str(folder / "params"), tree)
        for file in tokenizer_files:
            shutil.copyfile(file, folder / file.name)
        write_json(
            folder / "config.json",
            {
                "format": _FORMAT,
                "version": _VERSION,
                "kind": kind,
                "config": _plain(config),
                "stop_token_ids": list(stop_token_ids),
                "pad_token_id": pad_token_id,
            },
        )


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
        fields = dict(value["config"])
        given: dict[str, Any] = {"rope": _build(RopeConfig, fields["rope"])}
        if fields.get("moe") is not None:
            given["moe"] = _build(MoeConfig, fields["moe"])
        if fields.get("head") is not None:
            head = dict(fields["head"])
            given["head"] = _build(_HEADS[head.pop("type")], head)
        config = _build(_CONFIGS[kind], fields, **given)
        stop, pad = token_ids(value["stop_token_ids"]), pad_id(value)
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{path} is not a complete config: {one_line(e)}") from e
    return Header(kind, config, stop, pad)


def load(directory: str | Path, dtype: DTypeLike | None = None) -> tuple[Header, at.Params]:
    """What a checkpoint is, and its parameters, on the first device.

    Args:
        directory: Written by `save`.
        dtype: Of the parameters; None for the stored one.

    Raises:
        ValueError: If the directory is none of ours, incomplete or corrupt.
    """
    header = read_header(Path(directory))
    return header, load_params(Path(directory), header.config, dtype)


def load_params(
    directory: Path, config: TargetConfig | DraftConfig, dtype: DTypeLike | None = None
) -> at.Params:
    """The parameters of a checkpoint, which must be `config`'s. See `load`."""
    from orbax.checkpoint import v1 as ocp

    folder = Path(directory).absolute() / "params"
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    stored = _metadata(folder)
    shapes = {path: tuple(leaf.shape) for path, leaf in stored.items()}
    keys.check_shapes(shapes, keys.expected_shapes(config), directory)
    abstract: Any = keys.nest(
        {
            path: jax.ShapeDtypeStruct(leaf.shape, _kept(leaf.dtype, dtype), sharding=device)
            for path, leaf in stored.items()
        }
    )
    with _readable(folder):
        params: Any = ocp.load(str(folder), abstract)
    keys.check_params(params, config, directory)
    return params


def read_infos(directory: Path) -> Iterator[TensorInfo]:
    """Yields a checkpoint's parameters, named by their paths, without their values.

    Raises:
        ValueError: If they cannot be read.
    """
    for path, leaf in _metadata(directory.absolute() / "params").items():
        dtype, shape = jnp.dtype(leaf.dtype), tuple(leaf.shape)
        yield TensorInfo(path, dtype.name, shape, math.prod(shape) * dtype.itemsize)


def read_tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path, value) of a checkpoint's parameters, one at a time.

    Raises:
        ValueError: If they cannot be read.
    """
    from orbax.checkpoint import v1 as ocp

    folder = directory.absolute() / "params"
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    for path, leaf in _metadata(folder).items():
        abstract: Any = keys.nest({path: np.empty(leaf.shape, leaf.dtype)})
        with _readable(folder), context:
            tree: Any = ocp.load(str(folder), abstract)
            value = keys.flatten(tree)[path]
        yield path, np.asarray(value)


def _metadata(folder: Path) -> dict[str, Any]:
    """What Orbax says of each leaf."""
    from orbax.checkpoint import v1 as ocp

    with _readable(folder):
        metadata: Any = ocp.metadata(str(folder)).metadata
        stored = keys.flatten(metadata)
        if not stored:
            raise ValueError("it holds no readable parameters")
    return stored


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


def _plain(config: TargetConfig | DraftConfig) -> dict[str, Any]:
    """A config as JSON; a head names its type."""
    fields = dataclasses.asdict(config)
    if fields.get("head") is not None and isinstance(config, DraftConfig):
        fields["head"]["type"] = type(config.head).__name__
    return fields


def _build(cls: type, fields: Mapping[str, Any], **given: Any) -> Any:
    values = {**fields, **given}
    return build(cls, {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
