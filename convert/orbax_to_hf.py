"""Converts a target or a draft, from our Orbax form or any other that we read, to a Hugging Face folder.

python -m convert.orbax_to_hf SOURCE DEST [--dialect zlab|speculators] [--verifier REF] [--dtype D]
    [--num-target-layers N] [--target-layer-ids 1,9,17|default]
    [--window-rule zlab|nemo|specforge|speculators] [--sample-from-anchor | --no-sample-from-anchor]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from convert import source
from dflash_jax import pair
from dflash_jax.checkpoint import export, hf


def convert(
    ref: str,
    destination: Path,
    dtype=None,
    dialect: export.Dialect = "zlab",
    verifier: str | None = None,
    **draft_options,
) -> tuple[str, str]:
    """Writes `ref` to `destination`; returns what it was, and a line on what is not kept of its config.

    Args:
        ref: A hub id, a folder, an Orbax directory or a GGUF file.
        destination: Must not exist.
        dtype: None keeps each tensor's own.
        dialect: A draft's; targets have one form.
        verifier: The target's hub id or folder, for a draft in speculators' dialect.
        draft_options: `pair.read_draft_config`'s.

    Raises:
        ValueError: For anything that is wrong with the source or the destination, and for what the
            dialect cannot say.
    """
    source.refuse_existing(destination)
    path = hf.resolve(ref)
    if source.is_draft(path, draft_options):
        draft = pair.read_draft(path, pair.read_draft_config(path, **draft_options), dtype)
        export.save_draft(
            destination, draft.config, draft.params, None, dialect=dialect, verifier=verifier
        )
        return "draft", source.report(draft)
    target = pair.read_target(path, dtype)
    with source.tokenizer_files(target) as files:
        export.save_target(
            destination,
            target.config,
            target.params,
            stop_token_ids=target.stop_token_ids,
            pad_token_id=target.pad_token_id,
            tokenizer_files=files,
        )
    return "target", source.report(target)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m convert.orbax_to_hf", description=__doc__.splitlines()[0])  # fmt: skip
    parser.add_argument("source", metavar="SOURCE", help="Orbax or other folder, hub id or GGUF file")  # fmt: skip
    parser.add_argument("destination", metavar="DEST", type=Path, help="folder to make")
    parser.add_argument("--dialect", choices=export.DIALECTS, default="zlab", help="a draft's; targets have one form (default: zlab)")  # fmt: skip
    parser.add_argument("--verifier", metavar="REF", help="the target's hub id or folder, for speculators' dialect")  # fmt: skip
    source.add_options(parser)
    args = parser.parse_args(argv)
    # Nothing is computed, and the model may not fit a device.
    jax.config.update("jax_platforms", "cpu")
    try:
        options = source.draft_options(args)
        kind, note = convert(
            args.source, args.destination, args.dtype, args.dialect, args.verifier, **options
        )
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(*filter(None, (note, f"{kind} written to {args.destination}")), sep="\n", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
