"""The embedded pair on real prompts: acceptance, and tokens/s beside plain decoding.

    python -m benchmarks.prompts [--max-new-tokens 128]

What `dflash-jax bench` says of each set of prompts, greedy, in both dtypes, each with the block that suits it: on a
CPU a wider block costs more in float32 than in bfloat16. Writes `benchmarks/results/prompts.json`.
"""

import argparse
import dataclasses

from benchmarks import timing
from dflash_jax import bench
from dflash_jax.pair import load_draft, load_target, load_tokenizer
from dflash_jax.text import encode

BLOCKS = {"float32": 4, "bfloat16": 8}
COUNTS = {"held_out": 48, "humaneval": 8, "gsm8k": 8, "mtbench": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()
    found = []
    for dtype, block_size in BLOCKS.items():
        target = load_target(dtype=dtype)
        draft, tokenizer = load_draft(None, target, dtype=dtype), load_tokenizer(target)
        for name, count in COUNTS.items():
            prompts = [encode(tokenizer, text) for text in bench.read_prompts(name, count)]
            report = bench.run(
                target, draft, prompts, max_new_tokens=args.max_new_tokens, block_size=block_size
            )
            print(bench.table(report, f"{name}, {dtype}"), flush=True)
            found.append({"set": name, "dtype": dtype, **dataclasses.asdict(report)})
    print(timing.write("prompts", {"max_new_tokens": args.max_new_tokens, "sets": found}))


if __name__ == "__main__":
    main()
