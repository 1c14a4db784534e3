"""Trains a draft from a recipe, from nothing to a checkpoint that decodes.

    python -m train.run train/recipes/smollm2.toml [key=value ...]

Builds the prompts, lets the target answer them (and the held-out ones), trains, evaluates, exports.
Every stage goes on where an interrupted run stopped. SIGTERM and SIGINT let the step in flight, and its
evaluation, end and be saved; then the command exits with 143 or 130. A second signal ends it at once.

In the run's folder: `checkpoints` (the latest, and the best by held-out acceptance), `draft` (the best
one, exported), `metrics.jsonl`, `samples.jsonl` (decoded held-out prompts) and `tensorboard`.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import command
from dflash_jax.checkpoint.orbax import plain
from dflash_jax.pair import load_tokenizer
from train import metrics
from train.checkpoints import NOT_RANKED, measured, open_checkpoints, rank
from train.config import FREE, TrainConfig, read_recipe
from train.decoded import Decoded, choose, decode_examples, draft_in_memory, sample_records
from train.draft import export, first_state
from train.evaluate import evaluate
from train.inputs import make_step_input
from train.mesh import greatest, is_first, start, wait_for_all
from train.optimizer import make_schedule, trained_params
from train.preempt import Interrupted, catch_signals
from train.setup import Setup, prepare
from train.step import TrainState, train_step
from train.store import Example


def teacher_forced(setup: Setup, state: TrainState, examples: Sequence[Example]) -> float:
    """Teacher-forced acceptance length on some examples."""
    config, params = setup.config, trained_params(state.params, state.opt_state)
    return evaluate(
        setup.module, params, setup.embedding, setup.head, state.feature_scale, examples,
        anchors=24, batch_size=4, size=2 * config.response_size, chunk=config.chunk, d2t=state.d2t,
    )  # fmt: skip


def decode_sets(setup: Setup, state: TrainState) -> dict[str, Decoded]:
    """Some prompts of each held-out set, decoded with the draft as it is; sets without a round are left out."""
    config, params = setup.config, trained_params(state.params, state.opt_state)
    draft = draft_in_memory(setup.module.config, params, state.feature_scale, state.d2t)
    decoded = {
        name: decode_examples(
            setup.target, draft, choose(examples, config.decode_prompts), config.max_new_tokens
        )
        for name, examples in setup.held_out.items()
    }
    return {name: d for name, d in decoded.items() if any(d.rounds)}


def evaluate_all(
    setup: Setup, state: TrainState, decode: bool
) -> tuple[dict[str, dict[str, float]], Mapping[str, Decoded]]:
    """An evaluation's metrics, by held-out set, and what was decoded.

    Returns:
        `acceptance_length` (teacher-forced, the whole set) and, if `decode`, `decoded` and `gap`:
        teacher-forced minus decoded on the examples that were decoded.
    """
    sets = setup.held_out
    values = {"acceptance_length": {n: teacher_forced(setup, state, e) for n, e in sets.items()}}
    if not decode:
        return values, {}
    decoded = decode_sets(setup, state)
    values["decoded"] = {name: d.acceptance_length for name, d in decoded.items()}
    values["gap"] = {}
    for name, d in decoded.items():
        whole = len(d.examples) == len(sets[name])
        forced = (
            values["acceptance_length"][name] if whole else teacher_forced(setup, state, d.examples)
        )
        values["gap"][name] = forced - d.acceptance_length
    return values, decoded


def train(setup: Setup, stop: Callable[[], int | None] = lambda: None) -> None:
    """Runs the recipe's steps from the latest checkpoint on, and exports the best draft.

    Every process calls it; each holds its part of the state and of the batches.

    Args:
        stop: Asked after each step for the signal that ends the run, once the step is saved.

    Raises:
        Interrupted: If there is one.
    """
    with jax.set_mesh(setup.mesh):
        _train(setup, stop)


def _train(setup: Setup, stop: Callable[[], int | None]) -> None:
    config, draft = setup.config, setup.module.config
    metadata: Any = {"draft": plain(draft)}
    schedule, rates = make_schedule(config), metrics.Rates()
    with open_checkpoints(config) as checkpoints:
        state = first_state(config, setup.target, draft, setup.optimizer, setup.examples)
        if checkpoints.latest is not None:
            state = checkpoints.load(checkpoints.latest.step, state)
        first = int(state.step)
        with metrics.Log(config, first) as log:
            best = max((rank(m) for r in log.records if (m := measured(r))), default=NOT_RANKED)
            for done in range(first + 1, config.steps + 1):
                with rates.step() as counts:
                    state, values = one_step(setup, state, done - 1)
                    counts.update({name: values[name] for name in ("labels", "tokens")})
                rate = {"learning_rate": float(schedule(done - 1))}
                record: metrics.Record = {"step": done, **values, **rate, **rates.a_second}
                if done % config.evaluate_every == 0 or done == config.steps:
                    lengths, decoded = evaluate_all(setup, state, decodes_at(config, done))
                    record |= lengths
                    log.show(_samples(setup, done, decoded))
                score = measured(record)
                is_best = score is not None and rank(score) >= best
                if is_best:
                    best = rank(score)
                    export(draft, state, Path(config.run) / "draft")
                # Before the checkpoint: a run killed between the two repeats the steps and their records.
                log.write(record)
                number = stop()
                last = done == config.steps or number is not None
                if last or is_best or done % config.save_every == 0:
                    checkpoints.save(done, state, metrics=score, custom_metadata=metadata)
                if number is not None and done < config.steps:
                    raise Interrupted(number, f" after step {done}, which is saved")


def decodes_at(config: TrainConfig, step: int) -> bool:
    """Whether the evaluation at a step decodes: every `decode_every`-th, and the last."""
    every = config.evaluate_every * config.decode_every
    return every > 0 and (step % every == 0 or step == config.steps)


def _samples(setup: Setup, step: int, decoded: Mapping[str, Decoded]) -> list[dict[str, Any]]:
    try:
        tokenizer = load_tokenizer(setup.target) if decoded else None
    except ValueError:  # a target without one: ids are shown
        tokenizer = None
    return [
        sample
        for name, d in decoded.items()
        for sample in sample_records(step, name, d, tokenizer, setup.config.samples)
    ]


def one_step(setup: Setup, state: TrainState, step: int) -> tuple[TrainState, dict[str, float]]:
    """Step `step` (from 0) on `state`, which is donated; and its metrics. `tokens` counts padding too.

    Raises:
        ValueError: If the loss or its gradient is not finite.
    """
    config = setup.config
    blocks, ids = make_step_input(setup, step)
    state, values = train_step(
        state, setup.embedding, None if ids is None else jnp.asarray(ids), blocks, module=setup.module, optimizer=setup.optimizer,
        objective=config.objective, chunk=config.chunk, head=setup.head, dtype=config.dtype,
        accumulate=config.accumulate,
    )  # fmt: skip
    tokens = float(np.prod(blocks.features.shape[:2]))
    told: dict[str, float] = {name: float(value) for name, value in values.items()}
    if not np.isfinite([told["loss"], told["gradient_norm"]]).all():
        raise ValueError(
            f"step {step + 1}: loss={told['loss']} and gradient_norm={told['gradient_norm']} are no numbers to go "
            "on from; the latest checkpoint is of an earlier step. Try a smaller learning_rate or a longer warmup."
        )
    return state, told | {"tokens": tokens}


def keep_recipe(config: TrainConfig) -> None:
    """Writes the recipe into the run's folder, where a later call must bring the same one.

    Raises:
        ValueError: If the folder holds a run of another recipe, naming the keys that differ. A recipe by
            itself, of a run that ended before it made anything, is no run.
    """
    path = Path(config.run) / "recipe.json"
    begun = path.exists() and any(other != path for other in path.parent.iterdir())
    recipe, defaults = (
        json.loads(json.dumps(dataclasses.asdict(c))) for c in (config, TrainConfig(run=config.run))
    )
    if begun:
        kept = defaults | json.loads(path.read_text())  # keys that were not there yet had no effect
        other = sorted(k for k in kept.keys() | recipe.keys() if kept.get(k) != recipe.get(k))
        if other := [k for k in other if k not in FREE]:
            raise ValueError(
                f"{path.parent} holds a run with another {', '.join(other)}; name another run"
            )
    wait_for_all("the recipe is read")
    if is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(recipe, indent=1))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.run", description=__doc__.split("\n")[0], **command.examples("""
            python -m train.run train/recipes/smollm2.toml
            python -m train.run train/recipes/smollm2.toml run=runs/mine 'data=["chats.jsonl"]' packed=true
            python -m train.run train/recipes/smollm2.toml run=runs/short steps=200 mixture.kl_divergence=0.5
        """),
    )  # fmt: skip
    parser.epilog = f"{parser.epilog}\n\nExits with 0 when done, 1 for an error, 143 (SIGTERM) or 130 (SIGINT) when interrupted and saved."
    parser.add_argument("recipe", type=Path, help="TOML file, see train/config.py for the keys")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    command.use_compilation_cache()
    try:
        with catch_signals() as signals:
            config = read_recipe(args.recipe, args.overrides)
            metrics.check_wandb(config)
            mesh = start(config)
            keep_recipe(config)
            setup = prepare(config, mesh)
            signals.patient = True
            train(setup, lambda: greatest(signals.number))
    except (ValueError, OSError, FloatingPointError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except Interrupted as e:
        print(f"{e}; the same command goes on", file=sys.stderr)
        return 128 + e.number
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
