"""Converts a target or a draft, from Hugging Face or GGUF, to our Orbax form.

python -m convert.hf_to_orbax SOURCE DEST [--dtype D] [--target-layer-ids 1,9,17|default]
    [--num-target-layers N] [--window-rule zlab|nemo|specforge|speculators]
    [--sample-from-anchor | --no-sample-from-anchor]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from convert import source
from dflash_jax import pair
from dflash_jax.checkpoint import hf, orbax


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
    if source.is_draft(path, draft_options):
        draft = pair.read_draft(path, pair.read_draft_config(path, **draft_options), dtype)
        orbax.save(destination, "draft", draft.config, draft.params)
        return "draft", source.report(draft)
    target = pair.read_target(path, dtype)
    with source.tokenizer_files(target) as files:
        orbax.save(
            destination,
            "target",
            target.config,
            target.params,
            stop_token_ids=target.stop_token_ids,
            pad_token_id=target.pad_token_id,
            tokenizer_files=files,
        )
    return "target", source.report(target)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m convert.hf_to_orbax", description=__doc__.splitlines()[0])  # fmt: skip
    parser.add_argument("source", metavar="SOURCE", help="hub id, folder or GGUF file")
    parser.add_argument("destination", metavar="DEST", type=Path, help="folder to make")
    source.add_options(parser)
    args = parser.parse_args(argv)
    # Nothing is computed, and the model may not fit a device.
    jax.config.update("jax_platforms", "cpu")
    try:
        options = source.draft_options(args)
        kind, note = convert(args.source, args.destination, args.dtype, **options)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(*filter(None, (note, f"{kind} written to {args.destination}")), sep="\n", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
