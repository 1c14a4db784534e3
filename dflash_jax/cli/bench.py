"""`dflash-jax bench`."""

import argparse
import dataclasses
import json

from dflash_jax import bench, command
from dflash_jax.cli import decoding
from dflash_jax.text import encode


def run(args: argparse.Namespace) -> int:
    options = decoding.options(args)
    texts = bench.read_prompts(args.prompts, args.limit)
    target, draft, tokenizer = decoding.load(args)
    if draft is None:
        raise ValueError(
            "bench compares plain decoding with a draft; --draft none leaves nothing to compare"
        )
    prompts = [encode(tokenizer, text) for text in texts]
    with command.bar() as progress:
        task = progress.add_task("compiling", total=len(prompts))
        report = bench.run(
            target, draft, prompts, **options,
            progress=lambda done: progress.update(task, completed=done, description="decoding"),
        )  # fmt: skip
    print(
        json.dumps(dataclasses.asdict(report)) if args.json else bench.table(report, args.prompts)
    )
    # Rejection draws other texts than plain decoding, of the same distribution.
    sampling = options["sampling"]
    may_differ = sampling.temperature > 0 and sampling.verify != "coupled"
    return 0 if may_differ or report.equal == report.prompts else 1
