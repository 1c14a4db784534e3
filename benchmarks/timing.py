"""What the benchmarks share: alternating runs, what they ran on, and where results go."""

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

RESULTS = Path(__file__).parent / "results"


def alternate(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each way, called in turn; a first round, which compiles, is not counted.

    Args:
        ways: Each call's results are waited for.
        rounds: Counted calls of each.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for n in range(-1, rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way())
            if n >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine() -> dict[str, str]:
    """Processor, versions and date of a result."""
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    )
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    device = jax.devices()[0]
    return {
        "device": names[0] if device.platform == "cpu" and names else device.device_kind,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
        "date": datetime.date.today().isoformat(),
    }


def write(name: str, result: Mapping[str, Any]) -> Path:
    """Keeps a result with what it ran on as `results/NAME.json`; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    return path
