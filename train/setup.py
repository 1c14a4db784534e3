"""What a run needs before its first step: the target, the draft's module, the target's responses."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import optax

from dflash_jax.checkpoint import hf
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.pair import Target, embedded_target, load_target, open_target
from train import prompts as prompt_set
from train.config import TrainConfig
from train.data import frequent_ids, load_examples
from train.draft import draft_config
from train.optimizer import make_optimizer
from train.regenerate import answer_prompts
from train.store import Example, read_shard


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
    path = hf.resolve(config.target) if config.target else embedded_target()
    header, _ = open_target(path)
    module = DFlashDraftModel(draft_config(header, config))  # checked before any tensor is read
    target = load_target(path)
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
