"""What a run needs before its first step: the target, the draft's module, the examples."""

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import optax

from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.pair import Target, load_target, load_tokenizer
from train import prompts as prompt_set
from train.chat import Report, read_files
from train.config import TrainConfig
from train.data import frequent_ids
from train.draft import draft_config
from train.features import as_needed, origin_of, write_features
from train.optimizer import make_optimizer
from train.packing import pack
from train.regenerate import answer_prompts
from train.store import Example, Origin, load_examples, read_shard


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


def prepare(config: TrainConfig) -> Setup:
    """Makes what the recipe needs and is not there yet: prompts, responses, features."""
    run = Path(config.run)
    target = load_target(config.target or None)
    module = DFlashDraftModel(draft_config(target, config))
    origin = origin_of(target, load_tokenizer(target))
    examples, report = _examples(config, target, origin)
    counts = dataclasses.asdict(report) | {"rows": len(_rows(config, examples))}
    run.mkdir(parents=True, exist_ok=True)
    (run / "data.json").write_text(json.dumps(counts, indent=1))
    print(f"{config.run}: training on " + ", ".join(f"{v} {k}" for k, v in counts.items()), file=sys.stderr)  # fmt: skip
    held_out = {}
    for path in prompt_set.EVALUATION_FILES:
        answer_prompts(
            target, path, run / path.stem, config.target_layer_ids, rows=config.refill, refill=config.refill,
            max_new_tokens=config.max_new_tokens, size=2 * config.response_size, origin=origin,
        )  # fmt: skip
        held_out[path.stem] = load_examples(run / path.stem, config.target_layer_ids, origin)
    frequent = frequent_ids(examples, config.frequent)
    return Setup(config, target, module, make_optimizer(config), examples, held_out, frequent)


def taps_of(config: TrainConfig, target: Target) -> tuple[int, ...]:
    """The draft's taps, and behind them the last layer where the objective reads the target's logits."""
    last = (target.config.num_hidden_layers - 1,) if config.objective.needs_teacher else ()
    return (*config.target_layer_ids, *last)


def _rows(config: TrainConfig, examples: Sequence[Example]) -> list[list[int]]:
    """Which examples share a row."""
    if not config.packed:
        return [[i] for i in range(len(examples))]
    return pack([min(len(e.tokens), config.sequence_size) for e in examples], config.sequence_size)


def _examples(config: TrainConfig, target: Target, origin: Origin) -> tuple[list[Example], Report]:
    """What to train on, with its features; those of "online" are computed where they are looked at."""
    run, taps, online = Path(config.run), taps_of(config, target), config.features == "online"
    if config.data:
        examples, report = read_files(
            [Path(path) for path in config.data], load_tokenizer(target), config.sequence_size,
            too_long=config.too_long, thinking=config.thinking, turns=config.turns,
        )  # fmt: skip
        if not online:
            write_features(target, origin, examples, run / "features", taps, rows=config.refill)
            examples = load_examples(run / "features", taps, origin)
    else:
        given = config.features not in ("stored", "online")
        folder = Path(config.features) if given else run / "responses"
        if not given:
            _answer(config, target, folder, () if online else taps, origin)
        examples = load_examples(folder, () if online else taps, origin)
        report = Report(
            kept=len(examples),
            cut=sum(len(e.tokens) > config.sequence_size for e in examples),
            tokens=sum(len(e.tokens) for e in examples),
            supervised=sum(int(e.supervised.sum()) for e in examples),
        )
    return as_needed(target, examples, taps) if online else examples, report


def _answer(
    config: TrainConfig, target: Target, folder: Path, taps: tuple[int, ...], origin: Origin
) -> None:
    """The target's answers to the built prompts."""
    prompts = Path(config.run) / "prompts.jsonl"
    if not prompts.exists():
        built = prompt_set.build(config.prompts, config.seed)
        prompt_set.write_jsonl(prompts, prompt_set.split(built, 0)[0])
    answer_prompts(
        target, prompts, folder, taps, rows=config.rows, refill=config.refill,
        max_new_tokens=config.max_new_tokens, size=config.response_size,
        responses=read_shard(Path(config.responses)) if config.responses else (), origin=origin,
    )  # fmt: skip
