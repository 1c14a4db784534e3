"""The command line: `dflash-jax generate | chat | bench | inspect | completion`. Results on stdout, progress on stderr."""

import importlib
import os
from collections.abc import Sequence

from dflash_jax import command
from dflash_jax.cli.options import make_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; see `command.run` for the status."""
    return command.run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    args = make_parser().parse_args(argv)
    if args.no_color:
        os.environ["NO_COLOR"] = "1"  # for rich too
    with command.importing():
        chosen = importlib.import_module(f"dflash_jax.cli.{args.command}")
    return chosen.run(args)
