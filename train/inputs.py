"""A step's input: its sequences, anchors and head rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models.draft import first_slot
from dflash_jax.sharding import BATCH, place
from train.anchors import sample_anchors, sample_first_slots
from train.data import batch_indices, candidate_ids, make_batch
from train.evaluate import supervised_tokens
from train.setup import Setup
from train.step import Blocks, make_blocks


def make_step_input(setup: Setup, step: int) -> tuple[Blocks, np.ndarray | None]:
    """Step `step`'s blocks and head rows, None for all of a reduced vocabulary; a function of the step alone, so that a resumed run is the same run."""
    config, draft = setup.config, setup.module.config
    chosen = batch_indices(step, len(setup.examples), config.batch_size, config.seed)
    batch = make_batch([setup.examples[i] for i in chosen], config.sequence_size)
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    width = len(draft.target_layer_ids) * draft.hidden_size
    teacher = batch.features[..., width:] if config.objective.needs_teacher else None
    blocks = _sample_blocks(
        key, batch.tokens, batch.features[..., :width], batch.prompt_length, batch.length, teacher,
        anchors=config.anchors, block_size=config.block_size, prefix_base=config.prefix_base, first_slot=first_slot(draft),
    )  # fmt: skip
    if draft.draft_vocab_size is not None:
        return place(blocks, BATCH), None
    labels = np.asarray(blocks.labels)
    rng = np.random.default_rng((config.seed, step, 1))
    ids = candidate_ids(np.unique(labels), setup.frequent, draft.vocab_size, config.candidates, rng)
    blocks = blocks.replace(labels=jnp.asarray(np.searchsorted(ids, labels), jnp.int32))
    return place(blocks, BATCH), ids


@functools.partial(jax.jit, static_argnames=("anchors", "block_size", "prefix_base", "first_slot"))
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
    first_slot: int,
) -> Blocks:
    supervised = supervised_tokens(prompt_length, length, tokens.shape[1])
    positions, real = sample_anchors(key, supervised, anchors)
    first = None
    if prefix_base > 0:
        first = sample_first_slots(jax.random.fold_in(key, 1), real.shape, block_size, prefix_base)
    return make_blocks(
        tokens, features, supervised, positions, real, block_size, teacher, first, first_slot=first_slot
    )  # fmt: skip
