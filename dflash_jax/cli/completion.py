"""`dflash-jax completion`."""

import argparse
from typing import Any

from dflash_jax.cli.options import make_parser

_FILES = ("REF", "SET")  # metavars of what may be a path


def run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise ValueError(
            "completion needs shtab: pip install shtab, or dflash-jax[completion]"
        ) from None

    parser = make_parser()
    for action in _actions(parser):
        if action.metavar in _FILES:
            action.complete = shtab.FILE
    print(shtab.complete(parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> list[Any]:
    """Every argument of a parser and of its commands'."""
    found: list[Any] = []
    for action in parser._actions:
        found.append(action)
        if isinstance(action, argparse._SubParsersAction):
            found += [inner for command in action.choices.values() for inner in _actions(command)]
    return found
