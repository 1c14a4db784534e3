"""Training runs on the tiny target: their recipe, their setup, and what they leave behind."""

import dataclasses
import json
import struct
from pathlib import Path

import jax
import pytest
from fakes import prompts_of
from jax.sharding import Mesh
from tensorboardX.proto.event_pb2 import Event
from training import TAPS, answers, tiny_target

from dflash_jax import sharding
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.sharding import make_mesh, shard
from train import draft
from train.config import TrainConfig
from train.data import frequent_ids
from train.draft import draft_config
from train.metrics import scalars
from train.optimizer import make_optimizer
from train.setup import Setup
from train.store import load_examples, write_shard

TARGET = tiny_target()
LAST = TARGET.config.num_hidden_layers - 1
PROMPTS = prompts_of(3, 9, 6, 12, seed=8)


def write_store(folder: Path) -> Path:
    """A folder of two shards: four answers of the tiny target."""
    examples = answers(TARGET, PROMPTS, 20, (*TAPS, LAST))
    examples = [e for e in examples if len(e.tokens) - e.prompt_length > 3]
    assert len(examples) >= 3
    write_shard(folder, 0, examples[:2], (*TAPS, LAST))
    write_shard(folder, 1, examples[2:], (*TAPS, LAST))
    return folder


def recipe(run, **options) -> TrainConfig:
    defaults = dict(
        target_layer_ids=TAPS, num_hidden_layers=1, block_size=4, mask_token_id=63, batch_size=2, anchors=6,
        sequence_size=32, response_size=32, frequent=8, candidates=64, chunk=20, steps=6, warmup=2, learning_rate=3e-3,
        evaluate_every=3, save_every=2, decode_every=0, max_new_tokens=20,
    )  # fmt: skip
    return TrainConfig(run=str(run), **(defaults | options))


def set_up(store, run, **options) -> Setup:
    """A setup as a new process would make it: nothing is shared with another."""
    return set_up_recipe(store, recipe(run, **options), make_mesh(devices=jax.devices()[:1]))


def elsewhere(setup: Setup, run, **options) -> Setup:
    """The setup with another folder and other options of what is told and kept; compiles nothing anew."""
    config = dataclasses.replace(setup.config, run=str(run), **options)
    Path(run).mkdir(parents=True, exist_ok=True)
    return dataclasses.replace(setup, config=config)


def set_up_recipe(store, config: TrainConfig, mesh: Mesh) -> Setup:
    """What `prepare` would make of the recipe, with the answers of a store."""
    Path(config.run).mkdir(parents=True, exist_ok=True)
    target = tiny_target()
    target = dataclasses.replace(
        target, params=shard(target.params, mesh, sharding.TARGET.of(target.config))
    )
    taps = (*TAPS, LAST) if config.objective.needs_teacher else TAPS
    examples = load_examples(Path(store), taps)
    held_out = {"held_out": load_examples(Path(store), TAPS)[:2]}
    module = DFlashDraftModel(draft_config(target, config), config.remat)
    frequent = frequent_ids(examples, config.frequent)
    return Setup(config, target, module, make_optimizer(config), examples, held_out, frequent, mesh)


def begin(setup: Setup):
    """The first state, placed as a run has it: a step of it is the run's own program."""
    with jax.set_mesh(setup.mesh):
        return draft.first_state(
            setup.config, setup.target, setup.module.config, setup.optimizer, setup.examples
        )


def checkpoint(setup: Setup, step: int):
    from orbax.checkpoint import v1 as ocp

    with ocp.training.Checkpointer((Path(setup.config.run) / "checkpoints").absolute()) as c:
        return c.load(step, begin(setup))


def records(run, file: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (Path(run) / file).read_text().splitlines()]


def timeless(rows: list[dict]) -> list[dict]:
    """Records without what the clock says."""
    clock = ("time", "labels_per_second", "tokens_per_second")
    return [{k: v for k, v in r.items() if k not in clock} for r in rows]


def toml(config: TrainConfig) -> str:
    """What a recipe says beside the defaults, as TOML, whose scalars and lists are JSON's."""
    lines, unsaid = [], dataclasses.asdict(TrainConfig(run=""))
    for name, value in dataclasses.asdict(config).items():
        if value == unsaid[name]:
            continue
        table = isinstance(value, dict)
        text = ", ".join(f"{k} = {v}" for k, v in value.items()) if table else json.dumps(value)
        lines.append(f"{name} = {{{text}}}" if table else f"{name} = {text}")
    return "\n".join(lines)


def events(folder: Path) -> list[tuple[str, int, float]]:
    """(name, step, value) of every scalar in a folder's TensorBoard files."""
    found = []
    for path in folder.iterdir():
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += size + 16
    return sorted(found)


def scalars_of(rows) -> list[tuple[str, int, float]]:
    return sorted((name, r["step"], pytest.approx(v, rel=1e-6)) for r in rows for name, v in scalars(r))  # fmt: skip
