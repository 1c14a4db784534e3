"""A run's checkpoints: the latest ones, and the best one by held-out acceptance."""

import json
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from train.config import TrainConfig

# What a checkpoint at an evaluated step carries: the first held-out set's acceptance length by kind of
# measurement, of which only the first that a run has counts.
MEASURES = ("decoded", "acceptance_length")
NOT_RANKED = (False, 0.0)


def rank(metrics: dict[str, float]) -> tuple[bool, float]:
    """What the best checkpoint has most of: acceptance by decoding before teacher-forced."""
    measure = next(m for m in MEASURES if m in metrics)
    return measure == MEASURES[0], metrics[measure]


def measured(record: dict[str, Any]) -> dict[str, float] | None:
    """A metrics record's values for `rank`; None where the step was not evaluated."""
    first = next(iter(record.get("acceptance_length", ())), None)
    found = {m: record[m][first] for m in MEASURES if first in record.get(m, {})}
    return found or None


def open_checkpoints(config: TrainConfig) -> ocp.training.Checkpointer:
    """The run's checkpoints, to be read and added to; what a killed save left is removed."""
    policies = ocp.training.preservation_policies
    best = policies.BestN(get_metric_fn=rank, n=1, keep_checkpoints_without_metrics=False)  # pyrefly: ignore[bad-argument-type]
    keep: Any = policies.AnyPreservationPolicy([policies.LatestN(config.keep), best])
    folder = (Path(config.run) / "checkpoints").absolute()
    return ocp.training.Checkpointer(
        str(folder), preservation_policy=keep, cleanup_tmp_directories=True
    )


def find_checkpoint(run: str | Path, which: int | str = "latest") -> Path:
    """The folder of a run's checkpoint.

    Args:
        run: The run's folder.
        which: A step, "latest", or "best".

    Raises:
        ValueError: If the run has no such checkpoint.
    """
    folder = Path(run) / "checkpoints"
    steps = sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())
    ranks = {s: rank(m) for s in steps if (m := _metrics(folder / str(s)))}
    named = {
        "latest": steps[-1] if steps else None,
        "best": max(ranks, key=lambda s: (ranks[s], s), default=None),
    }
    step = named.get(which) if isinstance(which, str) else which
    if step not in steps:
        raise ValueError(f"{folder} has checkpoints of the steps {steps}, not {which}")
    return folder / str(step)


def _metrics(checkpoint: Path) -> dict[str, float] | None:
    path = checkpoint / "metrics" / "metrics"
    return json.loads(path.read_text()) if path.exists() else None
