"""What both converters know of a source: its options, its tokenizer's files, and what is lost of its config."""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from dflash_jax import pair
from dflash_jax.checkpoint import export, hf, orbax
from dflash_jax.checkpoint.files import read_json
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


def is_draft(path: Path, options: Mapping[str, Any]) -> bool:
    """Whether a path holds a draft, in whatever form.

    Raises:
        ValueError: If it is a target, but there are options for drafts.
    """
    if path.is_dir() and (
        orbax.read_header(path).kind == "draft"
        if orbax.is_checkpoint(path)
        else hf.is_draft(hf.read_config(path))
    ):
        return True
    for name in options:
        raise ValueError(f"{path} is a target: --{name.replace('_', '-')} is for drafts")
    return False


def refuse_existing(destination: Path) -> None:
    """Raises ValueError if something is there already: before the work, not after it."""
    if os.path.lexists(destination):
        raise ValueError(f"{destination} exists already; nothing was written")


@contextlib.contextmanager
def tokenizer_files(target: pair.Target) -> Generator[list[Path]]:
    """The target's tokenizer files; a GGUF file's are written to a folder that lasts as long."""
    if not target.source.is_file():
        yield hf.tokenizer_files(target.source)
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer: Any = pair.load_tokenizer(target)
        tokenizer.save_pretrained(folder)
        yield hf.tokenizer_files(Path(folder))


def report(model: pair.Target | pair.Draft) -> str:
    """One line on what our form does not keep of a Hugging Face source's config; empty if it keeps all."""
    if model.source.is_file() or orbax.is_checkpoint(model.source):
        return ""
    raw, dtype = hf.read_config(model.source), export.stored_dtype(model.params)
    try:
        if isinstance(model, pair.Draft):
            dialect = "speculators" if is_nested(raw) else "zlab"
            written = export.draft_json(model.config, dtype, dialect)
        else:
            written = export.target_json(model.config, dtype, model.stop_token_ids, model.pad_token_id)  # fmt: skip
    except ValueError as e:
        return f"note: this could not be written back as it came: {e}"
    lost = export.not_kept(raw, written)
    generation = model.source / "generation_config.json"
    if isinstance(model, pair.Target) and generation.is_file():
        kept = ("eos_token_id", "pad_token_id", "use_cache", "_from_model_config")
        others = (k for k, v in read_json(generation).items() if v is not None and v is not False)
        lost += [f"generation_config.{key}" for key in sorted(others) if key not in kept]
    return f"not kept of its config: {', '.join(lost)}" if lost else ""
