"""Seconds from a command's start to the first words of the embedded pair, without compiled programs and with them.

    python -m benchmarks.start [--rounds 5]

Each call is a process of its own, `dflash-jax generate`. The first one has an empty compilation cache, the others
the one that it leaves. Writes `benchmarks/results/start.json`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import timing

COMMAND = [sys.executable, "-m", "dflash_jax.cli", "generate", "Why is the sky blue?", "--max-new-tokens", "64"]  # fmt: skip


def first_words(cache: str) -> float:
    """Seconds until the command, with this folder for its caches, has written something."""
    start = time.perf_counter()
    with subprocess.Popen(
        COMMAND,
        env=os.environ | {"XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        word = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode or not word:
        raise RuntimeError(f"{' '.join(COMMAND)} failed")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="calls with compiled programs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        cold, *warm = [first_words(cache) for _ in range(args.rounds + 1)]
    result = {"seconds": {"cold": cold, "warm": statistics.median(warm)}}
    print(json.dumps(result, indent=1))
    print(timing.write("start", result))


if __name__ == "__main__":
    main()
