"""What both converters know of a source: its options, its leaves, its tokenizer's files, and what is lost of its config."""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax import command, pair
from dflash_jax.checkpoint import export, gguf, hf, keys, orbax
from dflash_jax.checkpoint.files import read_json, tidy_termination
from dflash_jax.config import DraftConfig
from dflash_jax.config.dialects import is_nested
from dflash_jax.config.draft import WINDOW_RULES

_OPTIONS = ("target_layer_ids", "window_rule", "sample_from_anchor", "num_target_layers")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The dtype, and what a draft's config may lack."""
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as stored")
    parser.add_argument("--target-layer-ids", metavar="IDS", help="a draft's taps if its config lacks them: 1,9,17, or default for the formula")  # fmt: skip
    parser.add_argument("--window-rule", choices=WINDOW_RULES, help="a draft's, if not its dialect's own")  # fmt: skip
    parser.add_argument("--sample-from-anchor", action=argparse.BooleanOptionalAction, help="whether a draft's slot 0 is a proposal, if its config does not say")  # fmt: skip
    parser.add_argument("--num-target-layers", type=int, metavar="N", help="the target's depth, if a draft's config does not say")  # fmt: skip


def draft_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `pair.read_draft_config` that were given.

    Raises:
        ValueError: If the tap ids are none.
    """
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    ids = given.get("target_layer_ids")
    if ids not in (None, "default"):
        try:
            given["target_layer_ids"] = tuple(int(i) for i in ids.split(","))
        except ValueError as e:
            raise ValueError(
                f"--target-layer-ids {ids!r} must be ids like 1,9,17, or default"
            ) from e
    return given


def open_leaves(
    path: Path, dtype: Any, options: Mapping[str, Any]
) -> tuple[orbax.Header, pair.Leaves]:
    """What a path holds, in whatever form, and its leaves; see `pair.open_target`.

    Raises:
        ValueError: As the readers do; and if it is a target, but there are options for drafts.
    """
    if path.is_dir() and (
        orbax.read_header(path).kind == "draft"
        if orbax.is_checkpoint(path)
        else hf.is_draft(hf.read_config(path))
    ):
        return pair.open_draft(path, pair.read_draft_config(path, **options), dtype)
    for name in options:
        raise ValueError(f"{path} is a target: --{name.replace('_', '-')} is for drafts")
    return pair.open_target(path, dtype)


def stored_dtype(path: Path) -> str:
    """The name of the dtype of a path's floats; the widest, where they differ; float32 for GGUF."""
    if path.is_file():
        return "float32"
    infos = orbax.read_infos(path) if orbax.is_checkpoint(path) else hf.read_infos(path)
    floats = {info.dtype for info in infos if info.dtype.startswith(("float", "bfloat"))}
    return jnp.result_type(*floats).name if floats else "float32"


def shapes(path: Path, header: orbax.Header, dtype: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every leaf that `open_leaves(path, dtype, ...)` yields, by path.

    Args:
        dtype: Of the floats; may be None for an Orbax source alone.
    """
    if orbax.is_checkpoint(path):
        stored = orbax.read_shapes(path / "params")
    else:
        expected = keys.expected_shapes(header.config)
        stored = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in expected.items()}
    return {
        name: x if dtype is None or name == keys.OFFSETS else jax.ShapeDtypeStruct(x.shape, dtype)
        for name, x in stored.items()
    }


def refuse_existing(destination: Path) -> None:
    """Raises ValueError if something is there already: before the work, not after it."""
    if os.path.lexists(destination):
        raise ValueError(f"{destination} exists already; nothing was written")


@contextlib.contextmanager
def tokenizer_files(path: Path) -> Generator[list[Path]]:
    """A target's tokenizer files; a GGUF file's are written to a folder that lasts as long."""
    if not path.is_file():
        yield hf.tokenizer_files(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        gguf.read_tokenizer(path).save_pretrained(folder)
        yield hf.tokenizer_files(Path(folder))


def report(path: Path, header: orbax.Header, dtype: str) -> str:
    """One line on what our form does not keep of a Hugging Face source's config; empty if it keeps all.

    Args:
        dtype: What the floats were stored in.
    """
    if path.is_file() or orbax.is_checkpoint(path):
        return ""
    raw, config = hf.read_config(path), header.config
    try:
        if isinstance(config, DraftConfig):
            dialect = "speculators" if is_nested(raw) else "zlab"
            written = export.draft_json(config, dtype, dialect)
        else:
            written = export.target_json(config, dtype, header.stop_token_ids, header.pad_token_id)
    except ValueError as e:
        return f"note: this could not be written back as it came: {e}"
    lost = export.not_kept(raw, written)
    generation = path / "generation_config.json"
    if header.kind == "target" and generation.is_file():
        kept = ("eos_token_id", "pad_token_id", "use_cache", "_from_model_config")
        others = (k for k, v in read_json(generation).items() if v is not None and v is not False)
        lost += [f"generation_config.{key}" for key in sorted(others) if key not in kept]
    return f"not kept of its config: {', '.join(lost)}" if lost else ""


def run(args: argparse.Namespace, convert: Callable[[dict[str, Any]], tuple[str, str]]) -> int:
    """Calls `convert` with the draft's options and says how it went: the exit status of a command."""
    # Nothing is computed, and the model may not fit a device.
    jax.config.update("jax_platforms", "cpu")

    def write() -> int:
        with tidy_termination():
            kind, note = convert(draft_options(args))
        print(
            *filter(None, (note, f"{kind} written to {args.destination}")),
            sep="\n",
            file=sys.stderr,
        )
        return 0

    return command.run(write, "interrupted; nothing was written")
