"""`dflash-jax inspect`."""

import argparse
import dataclasses
import json

import jax

from dflash_jax.checkpoint.inspect import inspect
from dflash_jax.checkpoint.inspect.render import render


def run(args: argparse.Namespace) -> int:
    jax.config.update("jax_platforms", "cpu")  # nothing is computed
    report = inspect(args.ref, args.target)
    if args.json:
        print(json.dumps({**dataclasses.asdict(report), "sound": report.sound}))
    else:
        render(report)
    return 0 if report.sound else 1
