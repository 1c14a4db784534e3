"""Memory and speed of conversion, both ways, on a synthetic sharded target.

    python -m benchmarks.conversion [--gigabytes 6] [--folder DIR]

Makes a bfloat16 Qwen3 target of that size in a temporary folder, converts it to our Orbax form and back in
a process each, and prints the peak resident memory above the interpreter's start (before any import, so
JAX's and Orbax's own share is counted) and the speed, beside that of a plain copy of the same files just
before and after. The tensors must come back bit for bit. Needs three times the size on the disk.
Writes `benchmarks/results/conversion.json`.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from benchmarks import timing
from dflash_jax.checkpoint import hf, keys, stream
from dflash_jax.checkpoint.files import tidy_termination, write_json
from dflash_jax.config import TargetConfig

BLOCK = 2**23  # bytes that the plain copy reads at once
HIDDEN, VOCAB = (
    2048,
    151936,
)  # Qwen3-1.7B's, the largest tensor 622 MB, twice: its head is untied here

# What each process runs: the conversion between two looks at its memory.
MEMORY = """
def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))
"""
CONVERT = """
import json, sys
{memory}
start = memory("VmRSS")
import time
before = time.perf_counter()
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
source, destination = Path(sys.argv[2]), Path(sys.argv[3])
{body}
seconds = time.perf_counter() - before
print(json.dumps({{"peak": memory("VmHWM") - start, "seconds": seconds}}))
"""
TO_ORBAX = """
from convert import hf_to_orbax
hf_to_orbax.convert(str(source), destination)
"""
TO_HF = """
from convert import orbax_to_hf
orbax_to_hf.convert(str(source), destination, shard_bytes=int(sys.argv[1]))
"""


def config_of_size(gigabytes: float) -> dict[str, Any]:
    """`config.json` of a target of about this size."""

    def config(layers: int) -> dict[str, Any]:
        return {
            "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN,
            "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": VOCAB, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "eos_token_id": 0,
        }  # fmt: skip

    def nbytes(layers: int) -> int:
        shapes = keys.expected_shapes(TargetConfig.from_hf(config(layers)))
        return sum(2 * math.prod(shape) for shape in shapes.values())

    layer = nbytes(2) - nbytes(1)
    return config(max(1, 1 + round((gigabytes * 1e9 - nbytes(1)) / layer)))


def make_target(folder: Path, config: Mapping[str, Any], shard_bytes: int) -> None:
    """Writes a bfloat16 target of random bits, which compress no better than weights."""
    expected = keys.expected_shapes(TargetConfig.from_hf(config))
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    names = {keys.name_of(path, "model."): shape for path, shape in expected.items()}
    rng = np.random.default_rng(0)

    def values() -> Iterator[tuple[str, np.ndarray]]:
        for name, shape in names.items():
            # Finite and of either sign: the exponent's highest bit is off.
            yield name, (rng.integers(0, 2**16, shape, np.uint16) & 0xBFFF).view(bfloat16)

    folder.mkdir()
    write_json(folder / "config.json", config)
    shapes = {name: jax.ShapeDtypeStruct(shape, bfloat16) for name, shape in names.items()}
    stream.write_safetensors(folder, shapes, values(), shard_bytes)


def copy_speed(source: Path, destination: Path) -> float:
    """Bytes a second of reading and writing the folder's files, which are removed again."""
    destination.mkdir()
    os.sync()  # what others left to be written is not ours to wait for
    before, total = time.perf_counter(), 0
    buffer = memoryview(bytearray(BLOCK))
    for file in sorted(source.glob("*.safetensors")):
        with (
            file.open("rb", buffering=0) as read,
            (destination / file.name).open("wb", buffering=0) as write,
        ):
            while count := read.readinto(buffer):
                write.write(buffer[:count])
                total += count
    speed = total / (time.perf_counter() - before)
    shutil.rmtree(destination)
    return speed


def run(body: str, source: Path, destination: Path, shard_bytes: int) -> dict[str, float]:
    """Converts in a new process; see `CONVERT`."""
    os.sync()
    done = subprocess.run(
        [sys.executable, "-c", CONVERT.format(memory=MEMORY, body=body), str(shard_bytes), str(source), str(destination)],
        stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def same_tensors(a: Path, b: Path) -> bool:
    """Whether two Hugging Face folders hold the same bits."""
    pairs = zip(hf.read_tensors(a), hf.read_tensors(b), strict=True)
    return all(
        m == n and x.dtype == y.dtype and np.array_equal(x.view(np.uint16), y.view(np.uint16))
        for (m, x), (n, y) in pairs
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion", description=__doc__.splitlines()[0])  # fmt: skip
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    args = parser.parse_args()
    shard_bytes = int(args.gigabytes * 1e9 / 3)
    with tidy_termination(), tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        hugging_face, ours, back = folder / "hf", folder / "ours", folder / "back"
        make_target(hugging_face, config_of_size(args.gigabytes), shard_bytes)
        files = list(hugging_face.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        print(f"{size / 1e9:.2f} GB in {len(files)} shards")
        found = []
        for title, body, source, destination in (
            ("Hugging Face -> Orbax", TO_ORBAX, hugging_face, ours),
            ("Orbax -> Hugging Face", TO_HF, ours, back),
        ):
            copies = [copy_speed(hugging_face, folder / "copy")]
            result = run(body, source, destination, shard_bytes)
            copies.append(copy_speed(hugging_face, folder / "copy"))
            copy, speed = sum(copies) / 2, size / result["seconds"]
            found.append(
                {"way": title, "peak_gigabytes": result["peak"] / 1e9, "over_copy": speed / copy}
            )
            print(
                f"{title}: peak {result['peak'] / 1e9:.2f} GB above the interpreter's start, "
                f"{result['seconds']:.1f} s, {speed / 1e9:.2f} GB/s; "
                f"a copy {copy / 1e9:.2f} GB/s, so {speed / copy:.2f} of it",
                flush=True,
            )
        same = same_tensors(hugging_face, back)
        print("every tensor came back bit for bit" if same else "error: tensors differ")
    if same:
        print(timing.write("conversion", {"gigabytes": size / 1e9, "ways": found}))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
