"""Trains a draft from a recipe, from nothing to a checkpoint that decodes.

    python -m train.run train/recipes/smollm2.toml [key=value ...]

Builds the prompts, lets the target answer them (and the held-out ones), trains, evaluates, exports.
Every stage goes on where an interrupted run stopped.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from orbax.checkpoint import v1 as ocp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dflash_jax.checkpoint.export import save_draft
from dflash_jax.checkpoint.orbax import plain
from dflash_jax.config import DraftConfig, RopeConfig
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.pair import Target, load_draft, load_target
from train import prompts as prompt_set
from train.anchors import sample_anchors, sample_first_slots
from train.config import TrainConfig, read_recipe
from train.data import batch_indices, candidate_ids, frequent_ids, load_examples, make_batch
from train.evaluate import evaluate, supervised_tokens
from train.regenerate import answer_prompts
from train.step import Blocks, TrainState, make_blocks, train_step
from train.store import Example, read_shard
from train.warm_start import feature_scale, fold_scale, random_params, warm_start

_console = Console(stderr=True)


def draft_config(target: Target, config: TrainConfig) -> DraftConfig:
    """A draft of the target's own shape, with Qwen3's query and key norms."""
    c = target.config
    return DraftConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=c.rope.theta),
        qk_norm=True,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.target_layer_ids,
        num_target_layers=c.num_hidden_layers,
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW after clipping, with linear warm-up and cosine decay; norms' weights do not decay."""
    peak = config.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, config.warmup, config.steps, peak * config.final_rate
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule,
            config.b1,
            config.b2,
            weight_decay=config.weight_decay,
            mask=functools.partial(jax.tree.map, lambda x: x.ndim > 1),
        ),
    )


@dataclasses.dataclass(frozen=True)
class Setup:
    """What stays the same over a run."""

    config: TrainConfig
    target: Target
    module: DFlashDraftModel
    optimizer: optax.GradientTransformation
    examples: Sequence[Example]
    held_out: Mapping[str, Sequence[Example]]
    frequent: np.ndarray

    @property
    def embedding(self):
        return self.target.params["embed_tokens"]["weight"]

    @property
    def head(self):
        return (
            self.embedding
            if self.target.config.tie_word_embeddings
            else self.target.params["lm_head"]["weight"]
        )


def prepare(config: TrainConfig) -> Setup:
    """Makes what the recipe needs and is not there yet: prompts, responses with features."""
    run = Path(config.run)
    target = load_target(config.target or None)
    module = DFlashDraftModel(draft_config(target, config))
    prompts = run / "prompts.jsonl"
    if not prompts.exists():
        built = prompt_set.build(config.prompts, config.seed)
        prompt_set.write_jsonl(prompts, prompt_set.split(built, 0)[0])
    taps = config.target_layer_ids
    if config.objective.needs_teacher:
        taps = (*taps, target.config.num_hidden_layers - 1)
    responses = list(read_shard(Path(config.responses), ())) if config.responses else []
    sets = {"responses": prompts} | {path.stem: path for path in prompt_set.EVALUATION_FILES}
    for name, path in sets.items():
        rows, refill = (
            (config.rows, config.refill) if name == "responses" else (config.refill, config.refill)
        )
        answer_prompts(
            target, path, run / name, taps, rows=rows, refill=refill, max_new_tokens=config.max_new_tokens,
            size=config.response_size if name == "responses" else 2 * config.response_size,
            responses=responses if name == "responses" else (),
        )  # fmt: skip
    examples = load_examples(run / "responses", taps)
    held_out = {
        name: load_examples(run / name, config.target_layer_ids)
        for name in sets
        if name != "responses"
    }
    return Setup(
        config,
        target,
        module,
        make_optimizer(config),
        examples,
        held_out,
        frequent_ids(examples, config.frequent),
    )


def first_state(setup: Setup) -> TrainState:
    """Step 0: the recipe's draft, or the target's last layers as one; AdamW's moments at zero.

    Raises:
        ValueError: If the recipe's draft has another shape than the recipe says.
    """
    config, draft = setup.config, setup.module.config
    width = len(draft.target_layer_ids) * draft.hidden_size
    taps = [dataclasses.replace(e, features=e.features[:, :width]) for e in setup.examples[:64]]
    scale = feature_scale(taps)
    if config.init:
        start = load_draft(config.init, setup.target, dtype="float32")
        if start.config != draft:
            raise ValueError(
                f"init={config.init!r} is {start.config}, but the recipe describes {draft}"
            )
        params = fold_scale(start.params, 1 / scale)
    else:
        random = random_params(draft, jax.random.key(config.seed))
        params = warm_start(random, setup.target.params, draft, scale, taps)
    moments = setup.optimizer.init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, moments, jnp.asarray(scale))


def make_step_input(setup: Setup, step: int) -> tuple[Blocks, np.ndarray]:
    """Step `step`'s blocks and head rows; a function of the step alone, so that a resumed run is the same run."""
    config, draft = setup.config, setup.module.config
    chosen = batch_indices(step, len(setup.examples), config.batch_size, config.seed)
    batch = make_batch([setup.examples[i] for i in chosen], config.sequence_size)
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    width = len(draft.target_layer_ids) * draft.hidden_size
    teacher = batch.features[..., width:] if config.objective.needs_teacher else None
    blocks = _sample_blocks(
        key, batch.tokens, batch.features[..., :width], batch.prompt_length, batch.length, teacher,
        anchors=config.anchors, block_size=config.block_size, prefix_base=config.prefix_base,
    )  # fmt: skip
    labels = np.asarray(blocks.labels)
    rng = np.random.default_rng((config.seed, step, 1))
    ids = candidate_ids(np.unique(labels), setup.frequent, draft.vocab_size, config.candidates, rng)
    return blocks.replace(labels=jnp.asarray(np.searchsorted(ids, labels), jnp.int32)), ids


@functools.partial(jax.jit, static_argnames=("anchors", "block_size", "prefix_base"))
def _sample_blocks(
    key,
    tokens,
    features,
    prompt_length,
    length,
    teacher,
    *,
    anchors: int,
    block_size: int,
    prefix_base: float,
) -> Blocks:
    supervised = supervised_tokens(prompt_length, length, tokens.shape[1])
    positions, real = sample_anchors(key, supervised, anchors)
    first = None
    if prefix_base > 0:
        first = sample_first_slots(jax.random.fold_in(key, 1), real.shape, block_size, prefix_base)
    return make_blocks(tokens, features, supervised, positions, real, block_size, teacher, first)


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
    """Runs the recipe's steps from the latest checkpoint on, and exports the best draft."""
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
        Progress(*columns, console=_console) as progress,
    ):
        state = first_state(setup)
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
                _console.print(f"step {done}", lengths)
                if lengths["held_out"] > best:
                    best = lengths["held_out"]
                    export(setup, state, run / "draft")
            # Before the checkpoint: a run killed between the two repeats the steps and their records.
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
    partial = metrics_file.with_suffix(".partial")
    partial.write_text("".join(json.dumps(r) + "\n" for r in records))
    partial.replace(metrics_file)
    return max(
        (r["acceptance_length"]["held_out"] for r in records if "acceptance_length" in r),
        default=0.0,
    )


def export(setup: Setup, state: TrainState, folder: Path) -> None:
    """Writes the draft in the flat Hugging Face dialect, bfloat16, in the place of an older one."""
    new, old = (folder.with_name(f"{folder.name}.{end}") for end in ("new", "old"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    save_draft(new, setup.module.config, fold_scale(state.params, state.feature_scale))
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


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
        free = {"run", "save_every", "evaluate_every"}
        other = sorted(k for k in kept.keys() | recipe.keys() if kept.get(k) != recipe.get(k))
        if other := [k for k in other if k not in free]:
            raise ValueError(
                f"{path.parent} holds a run with another {', '.join(other)}; name another run"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recipe, indent=1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.run", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path, help="TOML file, see train/config.py for the keys")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change")
    args = parser.parse_args(argv)
    try:
        config = read_recipe(args.recipe, args.overrides)
        keep_recipe(config)
        train(prepare(config))
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
