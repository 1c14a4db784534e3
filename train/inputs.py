"""A step's input: its sequences, anchors and head rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dflash_jax.models.draft import first_slot
from dflash_jax.ops.mask import document_positions
from dflash_jax.sharding import BATCH, place, place_parts
from train.anchors import choose_anchors, sample_first_slots
from train.data import batch_indices, candidate_ids, make_batch, stack_features
from train.features import online_features
from train.setup import Setup
from train.step import Blocks, make_blocks
from train.store import Example


def make_step_input(setup: Setup, step: int) -> tuple[Blocks, np.ndarray | None]:
    """Step `step`'s blocks and head rows; a function of the step alone, so that a resumed run is the same run.

    Args:
        setup: Of the run.
        step: From 0.

    Returns:
        The blocks, on the mesh if there is one, and the head rows; None for the whole vocabulary, the
        draft's own or the target's. Each process reads the features of its own rows.
    """
    config, draft = setup.config, setup.module.config
    chosen = batch_indices(step, len(setup.rows), config.batch_size, config.seed)
    rows = [[setup.examples[i] for i in setup.rows[n]] for n in chosen]
    batch = make_batch(rows, config.sequence_size)
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    blocks = _sample_blocks(
        key, batch.tokens, batch.supervised, batch.documents, batch.numbers,
        anchors=config.anchors, block_size=config.block_size, prefix_base=config.prefix_base, first_slot=first_slot(draft),
    )  # fmt: skip
    ids = None
    if draft.draft_vocab_size is None and config.candidates:
        labels, rng = np.asarray(blocks.labels), np.random.default_rng((config.seed, step, 1))
        ids = candidate_ids(
            np.unique(labels), setup.frequent, draft.vocab_size, config.candidates, rng
        )
        blocks = blocks.replace(labels=jnp.asarray(np.searchsorted(ids, labels), jnp.int32))
    documents = blocks.documents if config.packed else None
    blocks = place(blocks.replace(documents=documents), BATCH)
    features, width = _features(setup, rows), len(draft.target_layer_ids) * draft.hidden_size
    teacher = features[..., width:] if config.objective.needs_teacher else None
    return blocks.replace(features=features[..., :width], teacher=teacher), ids


def _features(setup: Setup, rows: list[list[Example]]) -> Float[Array, "B S CD"]:
    """The taps of the rows' examples, as the recipe wants them: stored, or computed now."""
    size = setup.config.sequence_size
    if setup.config.features == "online":
        return place(online_features(setup.target, rows, setup.taps, size), BATCH)
    shape = (len(rows), size, len(setup.taps) * setup.module.config.hidden_size)
    return place_parts(shape, lambda index: stack_features(rows[index[0]], size), BATCH)


@functools.partial(jax.jit, static_argnames=("anchors", "block_size", "prefix_base", "first_slot"))
def _sample_blocks(
    key,
    tokens,
    supervised,
    documents,
    numbers,
    *,
    anchors: int,
    block_size: int,
    prefix_base: float,
    first_slot: int,
) -> Blocks:
    """Blocks without features. An anchor's noise is of the step, the example and the place in it."""

    def keys_of(stream, numbers, places):
        stream = jax.random.fold_in(key, stream)

        def one(n, place):
            return jax.random.fold_in(jax.random.fold_in(stream, n), place)

        return jax.vmap(jax.vmap(one))(numbers, places)

    places = document_positions(documents)
    noise = jax.vmap(jax.vmap(jax.random.uniform))(keys_of(0, numbers, places))
    positions, real = choose_anchors(noise, supervised, anchors, documents)
    first = None
    if prefix_base > 0:
        at_anchors = (jnp.take_along_axis(x, positions, axis=1) for x in (numbers, places))
        draw = functools.partial(
            sample_first_slots, shape=(), block_size=block_size, base=prefix_base
        )
        first = jax.vmap(jax.vmap(draw))(keys_of(1, *at_anchors))
    return make_blocks(
        tokens, None, supervised, positions, real, block_size, None, first, documents, first_slot
    )
