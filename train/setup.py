"""What a run needs before its first step: the target, the draft's module, the examples."""

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from dflash_jax.checkpoint import hf
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.pair import Target, embedded_target, load_target, load_tokenizer, open_target
from dflash_jax.sharding import TARGET, make_mesh, placement
from train import prompts as prompt_set
from train.chat import Report, read_files
from train.config import TrainConfig
from train.data import frequent_ids
from train.draft import draft_config
from train.features import as_needed, origin_of, write_features
from train.mesh import is_first, wait_for_all
from train.optimizer import make_optimizer
from train.packing import pack
from train.regenerate import answer_prompts
from train.store import Example, Origin, load_examples, read_shard

# Of a run, beside those of its held-out answers.
_FOLDERS = ("checkpoints", "draft", "features", "responses", "tensorboard")


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
    mesh: Mesh = dataclasses.field(default_factory=lambda: make_mesh(devices=jax.devices()[:1]))

    @functools.cached_property
    def rows(self) -> list[list[int]]:
        """Which examples share a row of `sequence_size` tokens."""
        return _rows(self.config, self.examples)

    @property
    def taps(self) -> tuple[int, ...]:
        return taps_of(self.config, self.target)

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


def prepare(config: TrainConfig, mesh: Mesh) -> Setup:
    """Makes what the recipe needs and is not there yet: prompts, responses, features."""
    run, files = Path(config.run), held_out_files(config)
    source = hf.resolve(config.target) if config.target else embedded_target()
    header, _ = open_target(source)
    draft = draft_config(header, config)  # checked before any tensor is read
    module = DFlashDraftModel(draft, config.remat)
    rules = TARGET.of(header.config)
    target = load_target(source, sharding=placement(mesh, rules))
    origin = origin_of(target, load_tokenizer(target))
    documents, report = _documents(config, target)
    if is_first():  # alone, so with a target of its own where there are others
        alone = target if jax.process_count() == 1 else load_target(source)
        _make(config, alone, origin, documents)
    wait_for_all("the data are there")
    examples = _examples(config, target, origin, documents)
    if not config.data:
        report = _counted(config, examples)
    counts = dataclasses.asdict(report) | count_anchors(config, examples)
    if is_first():
        (run / "data.json").write_text(json.dumps(counts, indent=1))
        told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
        print(f"{config.run}: training on {told}", file=sys.stderr)
    held_out = {
        path.stem: load_examples(run / path.stem, config.target_layer_ids, origin) for path in files
    }
    frequent = frequent_ids(examples, config.frequent)
    return Setup(config, target, module, make_optimizer(config), examples, held_out, frequent, mesh)


def held_out_files(config: TrainConfig) -> list[Path]:
    """The files of prompts that a run is evaluated on; each gives its name to a folder of the run.

    Raises:
        ValueError: If one is missing, or two would share a folder.
    """
    files = [Path(path) for path in config.held_out or prompt_set.EVALUATION_FILES]
    if missing := [str(path) for path in files if not path.is_file()]:
        raise ValueError(f"held_out names {missing}, which are no files")
    names = [path.stem for path in files]
    if len({*names, *_FOLDERS}) < len(names) + len(_FOLDERS):
        raise ValueError(
            f"held_out={names} must differ from each other and from {sorted(_FOLDERS)}"
        )
    return files


def taps_of(config: TrainConfig, target: Target) -> tuple[int, ...]:
    """The draft's taps, and behind them the last layer where the objective reads the target's logits."""
    last = (target.config.num_hidden_layers - 1,) if config.objective.needs_teacher else ()
    return (*config.target_layer_ids, *last)


def _rows(config: TrainConfig, examples: Sequence[Example]) -> list[list[int]]:
    """Which examples share a row."""
    if not config.packed:
        return [[i] for i in range(len(examples))]
    return pack([min(len(e.tokens), config.sequence_size) for e in examples], config.sequence_size)


def count_anchors(config: TrainConfig, examples: Sequence[Example]) -> dict[str, int]:
    """Rows, the anchors that are legal in them, and how many of those an epoch draws: up to `anchors` a row.

    A packed row's documents share its anchors: where far fewer are drawn than are legal, raise `anchors`.
    """
    seen = [e.supervised[: config.sequence_size] for e in examples]
    legal = np.array([int((s[:-1] & s[1:]).sum()) for s in seen])
    rows = [int(legal[row].sum()) for row in _rows(config, examples)]
    drawn = sum(min(n, config.anchors) for n in rows)
    return {"rows": len(rows), "legal_anchors": sum(rows), "anchors_an_epoch": drawn}


def _counted(config: TrainConfig, examples: Sequence[Example]) -> Report:
    """The report of answers, none of which is left out."""
    return Report(
        kept=len(examples),
        cut=sum(len(e.tokens) > config.sequence_size for e in examples),
        tokens=sum(len(e.tokens) for e in examples),
        supervised=sum(int(e.supervised.sum()) for e in examples),
    )


def _documents(config: TrainConfig, target: Target) -> tuple[list[Example], Report]:
    """The recipe's files, if it names any.

    Raises:
        ValueError: If they are malformed, or too few for a step.
    """
    documents, report = read_files(
        [Path(path) for path in config.data], load_tokenizer(target), config.sequence_size,
        too_long=config.too_long, thinking=config.thinking, turns=config.turns,
    )  # fmt: skip
    rows = len(_rows(config, documents))
    if config.data and rows < config.batch_size:
        raise ValueError(
            f"data={list(config.data)} gives {rows} rows of up to {config.sequence_size=} tokens, fewer than "
            f"{config.batch_size=}"
        )
    return documents, report


def _examples(
    config: TrainConfig, target: Target, origin: Origin, documents: list[Example]
) -> list[Example]:
    """What to train on, with its features; those of "online" are computed where they are looked at."""
    run, taps, online = Path(config.run), taps_of(config, target), config.features == "online"
    if not (online and config.data):
        made = run / ("features" if config.data else "responses")
        folder = made if config.features in ("stored", "online") else Path(config.features)
        documents = load_examples(folder, () if online else taps, origin)
    return as_needed(target, documents, taps) if online else documents


def _make(config: TrainConfig, target: Target, origin: Origin, documents: list[Example]) -> None:
    """Writes the recipe's features or responses and the held-out ones, as far as that is not done yet."""
    run, taps, online = Path(config.run), taps_of(config, target), config.features == "online"
    run.mkdir(parents=True, exist_ok=True)
    sizes = dict(refill=config.refill, max_new_tokens=config.max_new_tokens, origin=origin)
    if config.data and not online:
        write_features(target, origin, documents, run / "features", taps, rows=config.refill)
    elif not config.data and config.features in ("stored", "online"):
        prompts = run / "prompts.jsonl"
        if not prompts.exists():
            built = prompt_set.build(config.prompts, config.seed)
            prompt_set.write_jsonl(prompts, prompt_set.split(built, 0)[0])
        answer_prompts(
            target, prompts, run / "responses", () if online else taps, rows=config.rows, size=config.response_size,
            responses=read_shard(Path(config.responses)) if config.responses else (), **sizes,
        )  # fmt: skip
    for path in held_out_files(config):
        answer_prompts(
            target, path, run / path.stem, config.target_layer_ids, rows=config.refill, size=2 * config.response_size,
            **sizes,
        )  # fmt: skip
