"""Runs the benchmarks one after the other, each in a process of its own, then draws the report.

    python -m benchmarks [NAME ...]

Without names all but `accelerator`, `conversion` and `quantized`, about 40 minutes on two cores: leave the machine alone meanwhile.
What needs torch is left out where it is not installed. Results go to `benchmarks/results/`, the report's tables into README.md and docs/.
"""

import argparse
import importlib.util
import subprocess
import sys

# What each needs beside the library's own dependencies.
SUITE: dict[str, tuple[str, ...]] = {
    "decoding": (),
    "prompts": (),
    "start": (),
    "against_torch": ("torch", "dflash", "accelerate"),
    "training_step": ("torch", "transformers"),
    "quantized": (),
    "conversion": (),
    "accelerator": (),
}
LEFT_OUT = ("accelerator", "conversion", "quantized")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SUITE)}")
    names = parser.parse_args().names
    if unknown := set(names) - set(SUITE):
        parser.error(f"{', '.join(sorted(unknown))} is none of {', '.join(SUITE)}")
    for name in names or [n for n in SUITE if n not in LEFT_OUT]:
        missing = [m for m in SUITE[name] if importlib.util.find_spec(m) is None]
        if missing:
            print(f"{name}: left out, {', '.join(missing)} is not installed", file=sys.stderr)
            continue
        print(f"{name}:", file=sys.stderr)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
    subprocess.run([sys.executable, "-m", "benchmarks.report"], check=True)


if __name__ == "__main__":
    main()
