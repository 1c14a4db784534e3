"""Converts a target or a draft, from Hugging Face or GGUF, to our Orbax form.

python -m convert.hf_to_orbax SOURCE DEST [--dtype D] [--target-layer-ids 1,9,17|default]
    [--window-rule zlab|nemo|specforge|speculators] [--sample-from-anchor | --no-sample-from-anchor]
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from dflash_jax import pair
from dflash_jax.checkpoint import gguf, hf, orbax
from dflash_jax.checkpoint.files import tidy_termination
from dflash_jax.checkpoint.stream import progress
from dflash_jax.config.draft import WINDOW_RULES


def convert(
    source: str, destination: Path, dtype=None, target_layer_ids=None, window_rule=None, sample_from_anchor=None
) -> str:  # fmt: skip
    """Writes `source` to `destination`, and says what it was.

    Args:
        source: A hub id, a folder or a GGUF file.
        destination: Must not exist.
        dtype: None keeps each tensor's own.
        target_layer_ids: A draft's taps, if its config lacks them; or "default".
        window_rule: Whose rule a draft's sliding layers were trained with, if not the dialect's own.
        sample_from_anchor: Whether a draft's slot 0 is a proposal, if its config does not say.

    Raises:
        ValueError: For anything that is wrong with the source or the destination.
    """
    if os.path.lexists(destination):
        raise ValueError(f"{destination} exists already; nothing was written")
    path = hf.resolve(source)
    if path.is_dir() and orbax.is_checkpoint(path):
        raise ValueError(f"{path} is in Orbax form already")
    if path.is_dir() and hf.is_draft(hf.read_config(path)):
        config = pair.read_draft_config(
            path, target_layer_ids, window_rule=window_rule, sample_from_anchor=sample_from_anchor
        )
        _write(destination, *pair.open_draft(path, config, dtype))
        return "draft"
    given = {"--target-layer-ids": target_layer_ids, "--window-rule": window_rule, "--sample-from-anchor": sample_from_anchor}  # fmt: skip
    for option, value in given.items():
        if value is not None:
            raise ValueError(f"{path} is a target: {option} is for drafts")
    header, leaves = pair.open_target(path, dtype)
    with tempfile.TemporaryDirectory() as folder:
        if path.is_file():
            gguf.read_tokenizer(path).save_pretrained(folder)
        files = hf.tokenizer_files(Path(folder) if path.is_file() else path)
        _write(destination, header, leaves, files)
    return "target"


def _write(
    destination: Path, header: orbax.Header, leaves: pair.Leaves, files: Sequence[Path] = ()
) -> None:
    with progress(f"writing {destination.name}", header.config) as shown:
        orbax.write(destination, header, shown(leaves), files)


def layer_ids(text: str) -> tuple[int, ...] | str:
    """Parses `1,9,17` or `default`."""
    try:
        return text if text == "default" else tuple(int(i) for i in text.split(","))
    except ValueError as e:
        raise ValueError(f"--target-layer-ids {text!r} must be ids like 1,9,17, or default") from e


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m convert.hf_to_orbax", description=__doc__.splitlines()[0])  # fmt: skip
    parser.add_argument("source", metavar="SOURCE", help="hub id, folder or GGUF file")
    parser.add_argument("destination", metavar="DEST", type=Path, help="folder to make")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as stored")
    parser.add_argument("--target-layer-ids", metavar="IDS", help="a draft's taps if its config lacks them: 1,9,17, or default for the formula")  # fmt: skip
    parser.add_argument("--window-rule", choices=WINDOW_RULES, help="a draft's, if not its dialect's own")  # fmt: skip
    parser.add_argument("--sample-from-anchor", action=argparse.BooleanOptionalAction, help="whether a draft's slot 0 is a proposal, if its config does not say")  # fmt: skip
    args = parser.parse_args(argv)
    jax.config.update(
        "jax_platforms", "cpu"
    )  # nothing is computed, and the model may not fit a device
    try:
        ids = None if args.target_layer_ids is None else layer_ids(args.target_layer_ids)
        with tidy_termination():
            kind = convert(
                args.source,
                args.destination,
                args.dtype,
                ids,
                args.window_rule,
                args.sample_from_anchor,
            )
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"{kind} written to {args.destination}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
