"""Teacher-forced acceptance length on held-out responses."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.draft import DFlashDraftModel, first_slot
from dflash_jax.sharding import BATCH, EVERYWHERE, constrain, place
from train.anchors import sample_anchors
from train.data import make_batch, stack_features
from train.objective import Objective, acceptance_length
from train.step import (
    Blocks,
    block_hidden,
    block_rows,
    in_vocabulary,
    make_blocks,
    target_rows,
    whole,
)
from train.store import Example


@functools.partial(jax.jit, static_argnames=("module", "chunk"))
def block_correct(
    module: DFlashDraftModel,
    params: Any,
    embedding: Float[Array, "V D"],
    head: Float[Array, "V D"],
    feature_scale: Float[Array, " CD"],
    blocks: Blocks,
    *,
    chunk: int,
) -> Bool[Array, "B A Q"]:
    """Where what the draft proposes, of all ids that it has, is the label, given the true tokens before it."""
    hidden = block_hidden(module, params, embedding, feature_scale, blocks)
    rows = block_rows(module, Objective(), chunk, params, hidden, embedding, head, blocks)
    return constrain(rows.correct.reshape(blocks.labels.shape), EVERYWHERE)


def evaluate(
    module: DFlashDraftModel,
    params: Any,
    embedding: Float[Array, "V D"],
    head: Float[Array, "V D"],
    feature_scale: Float[Array, " CD"],
    examples: Sequence[Example],
    *,
    anchors: int,
    batch_size: int,
    size: int,
    chunk: int,
    d2t: Int[Array, " Vd"] | None = None,
) -> float:
    """Mean teacher-forced acceptance length over up to `anchors` fixed anchors of each example.

    Args:
        params, feature_scale, d2t: See `step.TrainState`.
        head: The target's, of all ids.
    """
    first = first_slot(module.config)
    params, head = whole(params, d2t), target_rows(head, None, d2t)
    total, blocks_seen = 0.0, 0.0
    for start in range(0, len(examples), batch_size):
        chosen = list(examples[start : start + batch_size])
        padded = chosen + [chosen[-1]] * (batch_size - len(chosen))
        rows = [[e] for e in padded]
        batch = make_batch(rows, size)
        supervised = jnp.asarray(batch.supervised)
        supervised = supervised & (jnp.arange(batch_size) < len(chosen))[:, None]
        positions, real = sample_anchors(
            jax.random.fold_in(jax.random.key(0), start), supervised, anchors
        )
        blocks = make_blocks(
            jnp.asarray(batch.tokens),
            jnp.asarray(stack_features(rows, size)),
            supervised,
            positions,
            real,
            module.config.block_size,
            first_slot=first,
        )
        blocks = place(in_vocabulary(blocks, d2t), BATCH)
        correct = block_correct(module, params, embedding, head, feature_scale, blocks, chunk=chunk)
        length, count = acceptance_length(correct, blocks.counts, blocks.real, first)
        total, blocks_seen = total + float(length), blocks_seen + float(count)
    return total / max(blocks_seen, 1.0)
