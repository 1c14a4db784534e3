"""`dflash-jax completion`."""

import argparse

from dflash_jax.cli.options import make_parser


def run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise ValueError(
            "completion needs shtab: pip install shtab, or dflash-jax[completion]"
        ) from None

    print(shtab.complete(make_parser(), args.shell))
    return 0
