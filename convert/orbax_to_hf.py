"""Converts a target or a draft, from our Orbax form or any other that we read, to a Hugging Face folder, leaf by leaf.

python -m convert.orbax_to_hf SOURCE DEST [--dialect zlab|speculators] [--verifier REF] [--dtype D]
    [--num-target-layers N] [--target-layer-ids 1,9,17|default]
    [--window-rule zlab|nemo|specforge|speculators] [--sample-from-anchor | --no-sample-from-anchor]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from convert import source
from dflash_jax import command
from dflash_jax.checkpoint import export, hf, orbax
from dflash_jax.checkpoint.stream import SHARD_BYTES, watched


def convert(
    ref: str,
    destination: Path,
    dtype=None,
    dialect: export.Dialect = "zlab",
    verifier: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    **draft_options,
) -> tuple[str, str]:
    """Writes `ref` to `destination`; returns what it was, and a line on what is not kept of its config.

    Args:
        ref: A hub id, a folder, an Orbax directory or a GGUF file.
        destination: Must not exist.
        dtype: None keeps the stored one; the widest, where a Hugging Face source has several.
        dialect: A draft's; targets have one form.
        verifier: The target's hub id or folder, for a draft in speculators' dialect.
        shard_bytes: Above it there are several files, and their index.
        draft_options: `pair.read_draft_config`'s.

    Raises:
        ValueError: For anything that is wrong with the source or the destination, and for what the
            dialect cannot say.
    """
    source.refuse_existing(destination)
    path = hf.resolve(ref)
    stored = source.stored_dtype(path)
    if dtype is None and not orbax.is_checkpoint(path):
        dtype = stored
    header, leaves = source.open_leaves(path, dtype, draft_options)
    with (
        source.tokenizer_files(path) as files,
        command.working(f"writing {destination.name}") as progress,
    ):
        leaves = watched(leaves, header.config, progress)
        export.write(
            destination, header, leaves, source.shapes(path, header, dtype),
            dialect=dialect, verifier=verifier, tokenizer_files=files, shard_bytes=shard_bytes,
        )  # fmt: skip
    return header.kind, source.report(path, header, stored)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m convert.orbax_to_hf", description=__doc__.splitlines()[0], **command.examples("""
            python -m convert.orbax_to_hf runs/smollm2/draft draft-hf
            python -m convert.orbax_to_hf draft draft-hf --dialect speculators --verifier Qwen/Qwen3-4B
        """),
    )  # fmt: skip
    parser.add_argument("source", metavar="SOURCE", help="Orbax or other folder, hub id or GGUF file")  # fmt: skip
    parser.add_argument("destination", metavar="DEST", type=Path, help="folder to make")
    parser.add_argument("--dialect", choices=export.DIALECTS, default="zlab", help="a draft's; targets have one form (default: zlab)")  # fmt: skip
    parser.add_argument("--verifier", metavar="REF", help="the target's hub id or folder, for speculators' dialect")  # fmt: skip
    source.add_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    given = args.source, args.destination, args.dtype, args.dialect, args.verifier
    return source.run(args, lambda options: convert(*given, **options))


if __name__ == "__main__":
    sys.exit(main())
