"""Converts a target or a draft from Hugging Face's form, or a GGUF target, to our Orbax form, leaf by leaf.

python -m convert.hf_to_orbax SOURCE DEST [--dtype bfloat16] [--target-layer-ids 1,9,17|default]
    [--window-rule zlab|nemo|specforge|speculators] [--sample-from-anchor | --no-sample-from-anchor]
    [--num-target-layers N]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from convert import source
from dflash_jax import command
from dflash_jax.checkpoint import hf, orbax
from dflash_jax.checkpoint.stream import watched


def convert(ref: str, destination: Path, dtype=None, **draft_options) -> tuple[str, str]:
    """Writes `ref` to `destination`; returns what it was, and a line on what is not kept of its config.

    Args:
        ref: A hub id, a folder or a GGUF file.
        destination: Must not exist.
        dtype: None keeps each tensor's own.
        draft_options: `pair.read_draft_config`'s.

    Raises:
        ValueError: For anything that is wrong with the source or the destination.
    """
    source.refuse_existing(destination)
    path = hf.resolve(ref)
    if path.is_dir() and orbax.is_checkpoint(path):
        raise ValueError(f"{path} is in Orbax form already")
    header, leaves = source.open_leaves(path, dtype, draft_options)
    with (
        source.tokenizer_files(path) as files,
        command.working(f"writing {destination.name}") as progress,
    ):
        leaves = watched(leaves, header.config, progress)
        orbax.write(destination, header, leaves, files if header.kind == "target" else ())
    return header.kind, source.report(path, header, source.stored_dtype(path))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m convert.hf_to_orbax", description=__doc__.splitlines()[0], **command.examples("""
            python -m convert.hf_to_orbax Qwen/Qwen3-4B qwen3-4b
            python -m convert.hf_to_orbax z-lab/Qwen3-4B-DFlash-b16 draft --dtype float32
            python -m convert.hf_to_orbax model.gguf target --dtype bfloat16
        """),
    )  # fmt: skip
    parser.add_argument("source", metavar="SOURCE", help="hub id, folder or GGUF file")
    parser.add_argument("destination", metavar="DEST", type=Path, help="folder to make")
    source.add_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return source.run(args, lambda o: convert(args.source, args.destination, args.dtype, **o))


if __name__ == "__main__":
    sys.exit(main())
