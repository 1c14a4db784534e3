"""Trains a draft from a recipe, from nothing to a checkpoint that decodes.

    python -m train.run train/recipes/smollm2.toml [key=value ...]

Builds the prompts, lets the target answer them (and the held-out ones), trains, evaluates, exports.
Every stage goes on where an interrupted run stopped.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dflash_jax.checkpoint.orbax import plain
from train.config import TrainConfig, read_recipe
from train.draft import export, first_state
from train.evaluate import evaluate
from train.inputs import make_step_input
from train.mesh import is_first, start, wait_for_all
from train.setup import Setup, prepare
from train.step import TrainState, train_step

_console = Console(stderr=True)


def evaluate_all(setup: Setup, state: TrainState) -> dict[str, float]:
    """Teacher-forced acceptance length on each held-out set."""
    config = setup.config
    return {
        name: evaluate(
            setup.module, state.params, setup.embedding, setup.head, state.feature_scale, examples,
            anchors=24, batch_size=4, size=2 * config.response_size, chunk=config.chunk,
        )
        for name, examples in setup.held_out.items()
    }  # fmt: skip


def train(setup: Setup) -> None:
    """Runs the recipe's steps from the latest checkpoint on, and exports the best draft.

    Every process calls it; each holds its part of the state and of the batches.
    """
    with jax.set_mesh(setup.mesh):
        _train(setup)


def _train(setup: Setup) -> None:
    config, run = setup.config, Path(setup.config.run)
    metrics_file = run / "metrics.jsonl"
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    keep: Any = ocp.training.preservation_policies.LatestN(2)
    with (
        ocp.training.Checkpointer(
            str((run / "checkpoints").absolute()),
            preservation_policy=keep,
            cleanup_tmp_directories=True,
        ) as checkpointer,
        Progress(*columns, console=_console, disable=not is_first()) as progress,
    ):
        state = first_state(
            config, setup.target, setup.module.config, setup.optimizer, setup.examples
        )
        if checkpointer.latest is not None:
            state = checkpointer.load(checkpointer.latest.step, state)
        first = int(state.step)
        best = _forget_later(metrics_file, first)
        task = progress.add_task("", total=config.steps, completed=first, note="")
        labels, since = 0.0, time.perf_counter()
        for done in range(first + 1, config.steps + 1):
            state, values = one_step(setup, state, done - 1)
            labels += values["labels"]
            rate = labels / (time.perf_counter() - since)
            note = (
                f"loss {values['loss']:.3f} accuracy {values['accuracy']:.3f} {rate:.0f} labels/s"
            )
            progress.update(task, advance=1, note=note)
            record: dict[str, Any] = {"step": done, **values, "labels_per_second": rate}
            if done % config.evaluate_every == 0 or done == config.steps:
                lengths = record["acceptance_length"] = evaluate_all(setup, state)
                if is_first():
                    _console.print(f"step {done}", lengths)
                if lengths["held_out"] > best:
                    best = lengths["held_out"]
                    export(setup.module.config, state, run / "draft")
            # Before the checkpoint: a run killed between the two repeats the steps and their records.
            if is_first():
                with metrics_file.open("a") as f:
                    f.write(json.dumps(record) + "\n")
            if done % config.save_every == 0 or done == config.steps:
                checkpointer.save(
                    done, state, custom_metadata={"draft": plain(setup.module.config)}
                )


def one_step(setup: Setup, state: TrainState, step: int) -> tuple[TrainState, dict[str, float]]:
    """Step `step` (from 0) on `state`, which is donated; and its metrics."""
    config = setup.config
    blocks, ids = make_step_input(setup, step)
    state, metrics = train_step(
        state, setup.embedding, jnp.asarray(ids), blocks, module=setup.module, optimizer=setup.optimizer,
        objective=config.objective, chunk=config.chunk, head=setup.head, dtype=config.dtype,
    )  # fmt: skip
    return state, {name: float(value) for name, value in metrics.items()}


def _forget_later(metrics_file: Path, step: int) -> float:
    """Drops the records after `step`, whose steps an interrupted run repeats.

    Returns:
        The best held-out acceptance among the others.
    """
    lines = metrics_file.read_text().splitlines() if metrics_file.exists() else []
    records = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed
            records.append(json.loads(line))
    records = [r for r in records if r["step"] <= step]
    wait_for_all("metrics are read")
    if is_first():
        partial = metrics_file.with_suffix(".partial")
        partial.write_text("".join(json.dumps(r) + "\n" for r in records))
        partial.replace(metrics_file)
    return max(
        (r["acceptance_length"]["held_out"] for r in records if "acceptance_length" in r),
        default=0.0,
    )


def keep_recipe(config: TrainConfig) -> None:
    """Writes the recipe into the run's folder, where a later call must bring the same one.

    Raises:
        ValueError: If the folder holds a run of another recipe, naming the keys that differ.
    """
    path = Path(config.run) / "recipe.json"
    recipe, defaults = (
        json.loads(json.dumps(dataclasses.asdict(c))) for c in (config, TrainConfig(run=config.run))
    )
    if path.exists():
        kept = defaults | json.loads(path.read_text())  # keys that were not there yet had no effect
        free = {"run", "save_every", "evaluate_every", "mesh", "distributed"}
        other = sorted(k for k in kept.keys() | recipe.keys() if kept.get(k) != recipe.get(k))
        if other := [k for k in other if k not in free]:
            raise ValueError(
                f"{path.parent} holds a run with another {', '.join(other)}; name another run"
            )
    wait_for_all("recipe is read")
    if is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(recipe, indent=1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.run", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path, help="TOML file, see train/config.py for the keys")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change")
    args = parser.parse_args(argv)
    try:
        config = read_recipe(args.recipe, args.overrides)
        mesh = start(config)
        keep_recipe(config)
        train(prepare(config, mesh))
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
