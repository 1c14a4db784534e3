"""One optimiser step of a draft: loss over sampled anchors, gradients, update. Pure and jitted."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import Domino
from dflash_jax.models import apply
from dflash_jax.models.draft import DFlashDraftModel, first_slot
from dflash_jax.sharding import DRAFT, EVERYWHERE, TARGET, VOCABULARY, constrain
from train.anchors import block_labels
from train.heads import head_rows, readout, rows_of
from train.objective import (
    LEAST_DIVISOR,
    Objective,
    Rows,
    Totals,
    acceptance_length,
    vocabulary_loss,
    weighted,
)
from train.vocabulary import draft_labels, target_ids


class TrainState(struct.PyTreeNode):
    """What a checkpoint holds.

    Attributes:
        step: Updates so far; it alone determines the data position and every key.
        params: The draft's parameters, float32, with `fc` acting on scaled features; all but `d2t`.
        opt_state: optax's state.
        feature_scale: What each channel of the taps is multiplied with before `fc`.
        d2t: Of a draft with a reduced vocabulary: the target's id of each of its ids, less that id.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    feature_scale: Float[Array, " CD"]
    d2t: Int[Array, " Vd"] | None = None


class Blocks(struct.PyTreeNode):
    """A batch with its anchors; see `data.Batch` and `anchors.py`.

    Attributes:
        features: `[B, S, C * D]`.
        teacher: The target's normed last hidden states `[B, S, D]`, where the objective needs them.
        tokens: Ids `[B, A, Q]` of the positions that the blocks cover.
        anchors: Positions `[B, A]` in the row.
        first: Slot `[B, A]` of each block that is predicted first: `first_slot`, or more behind a visible
            prefix.
        labels: Ids `[B, A, Q]`, as indices into the head rows that take part.
        counts: Which labels count.
        real: Which anchors are real.
        documents: Of packed rows, the document of each position, negative for padding.
        inside: Which labels a draft with a reduced vocabulary has; None for all.
        first_slot: Of the draft: the slot that predicts the token behind the anchor.
    """

    features: Float[Array, "B S CD"]
    teacher: Float[Array, "B S D"] | None
    tokens: Int[Array, "B A Q"]
    anchors: Int[Array, "B A"]
    first: Int[Array, "B A"]
    labels: Int[Array, "B A Q"]
    counts: Bool[Array, "B A Q"]
    real: Bool[Array, "B A"]
    documents: Int[Array, "B S"] | None = None
    inside: Bool[Array, "B A Q"] | None = None
    first_slot: int = struct.field(pytree_node=False, default=1)

    @property
    def anchor_tokens(self) -> Int[Array, "B A"]:
        return self.tokens[:, :, 0]


def block_hidden(
    module: DFlashDraftModel,
    params: Any,
    embedding: Float[Array, "V D"],
    feature_scale: Float[Array, " CD"],
    blocks: Blocks,
) -> Float[Array, "D B T"]:
    """The draft's hidden states `[D, B, A * Q]` of every block.

    Raises:
        ValueError: If the blocks were made for a draft that predicts from another slot on.
    """
    c = module.config
    if blocks.first_slot != first_slot(c):
        raise ValueError(f"{blocks.first_slot=}, but the draft predicts from {first_slot(c)} on")
    B, A, Q = blocks.labels.shape
    seen = jnp.arange(Q)[None, None] < jnp.maximum(blocks.first, 1)[:, :, None]
    ids = jnp.where(seen, blocks.tokens, c.mask_token_id)
    table = params["embed_tokens"]["weight"] if c.own_embedding else embedding
    x = table[ids.reshape(B, A * Q)].transpose(2, 0, 1) * c.input_embedding_scale
    context = (blocks.features.astype(jnp.float32) * feature_scale[None, None]).transpose(2, 0, 1)
    return apply(module, params, x, context, blocks.anchors, blocks.documents, method="blocks")


def block_loss(
    module: DFlashDraftModel,
    objective: Objective,
    chunk: int,
    params: Any,
    embedding: Float[Array, "V D"],
    head: Float[Array, "V2 D"],
    feature_scale: Float[Array, " CD"],
    blocks: Blocks,
    ids: Int[Array, " V2"] | None = None,
    base_share: Float[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Totals]:
    """The objective over the counting slots, and its parts.

    Args:
        params: All of the draft's.
        embedding: The target's.
        head: The target's rows of the ids that take part.
        ids: Those ids, as indices into the draft's own tables; None for all that it has.
        base_share: See `vocabulary_loss`.
    """
    hidden = block_hidden(module, params, embedding, feature_scale, blocks)
    rows = block_rows(
        module, objective, chunk, params, hidden, embedding, head, blocks, ids, base_share
    )
    counts = blocks.counts
    if blocks.inside is not None and objective.needs_labels:
        counts = counts & blocks.inside
    return weighted(objective, rows, blocks.first, counts)


def block_rows(
    module: DFlashDraftModel,
    objective: Objective,
    chunk: int,
    params: Any,
    hidden: Float[Array, "D B T"],
    embedding: Float[Array, "V D"],
    head: Float[Array, "V2 D"],
    blocks: Blocks,
    ids: Int[Array, " V2"] | None = None,
    base_share: Float[Array, ""] | None = None,
) -> Rows:
    """What `block_loss` sums up, of every slot; the slots before `Blocks.first_slot` are zero.

    Args:
        hidden: The draft's hidden states `[D, B, A * Q]`; the others as there.

    Raises:
        ValueError: If the objective needs the target's states and the blocks have none.
    """
    (B, A, Q), skip = blocks.labels.shape, blocks.first_slot
    hidden = hidden.reshape(-1, B, A, Q)[..., skip:].reshape(-1, B, A * (Q - skip))
    read = readout(module, params, hidden, blocks.tokens[:, :, : Q - skip], embedding, ids)
    draft_head, of_target = head_rows(module.config, params, head, ids)
    rows = vocabulary_loss(
        objective, hidden.reshape(len(hidden), -1), draft_head, blocks.labels[:, :, skip:].reshape(-1),
        _teacher_rows(blocks), chunk=chunk, sequences=B, read=read.replace(of_target=of_target), base_share=base_share,
        learns=module.config.own_head,
    )  # fmt: skip
    if blocks.inside is not None:
        rows = rows._replace(correct=rows.correct & blocks.inside[:, :, skip:].reshape(-1))

    def every_slot(x):
        return jnp.pad(x.reshape(B, A, -1), ((0, 0), (0, 0), (skip, 0))).reshape(-1)

    return jax.tree.map(every_slot, rows)


def _teacher_rows(blocks: Blocks) -> Float[Array, "D R"] | None:
    """The target's states that predict the labels: of the position before each."""
    if blocks.teacher is None:
        return None
    B, S, D = blocks.teacher.shape
    predicted = jnp.arange(blocks.labels.shape[2] - blocks.first_slot, dtype=blocks.anchors.dtype)
    position = blocks.anchors[:, :, None] + predicted[None, None]
    position = jnp.clip(position, 0, S - 1).reshape(B, -1, 1)
    rows = jnp.take_along_axis(blocks.teacher, position, axis=1).astype(jnp.float32)
    return rows.reshape(-1, D).T


def make_blocks(
    tokens,
    features,
    supervised,
    anchors,
    real,
    block_size: int,
    teacher=None,
    first=None,
    documents=None,
    first_slot: int = 1,
) -> Blocks:
    """The blocks of given anchors, labels as token ids; slots before `first` are seen and do not count."""
    S = tokens.shape[1]
    slot = jnp.arange(block_size, dtype=anchors.dtype)[None, None]
    covered = jnp.minimum(anchors[:, :, None] + slot, S - 1)
    shown = jnp.take_along_axis(tokens, covered.reshape(len(tokens), -1), axis=1)
    labels, counts = block_labels(
        tokens, supervised, anchors, real, block_size, documents, first_slot
    )
    first = jnp.full_like(anchors, first_slot) if first is None else first
    counts = counts & (slot >= first[:, :, None])
    return Blocks(
        features, teacher, shown.reshape(covered.shape), anchors, first, labels, counts, real, documents,
        first_slot=first_slot,
    )  # fmt: skip


class Sums(struct.PyTreeNode):
    """What a step adds up over the parts of its batch.

    Attributes:
        gradients: Of each of `Totals.numerators`.
        numerators, divisors: See `Totals`.
        counts: See `counts_of`.
    """

    gradients: tuple[Any, ...]
    numerators: Float[Array, " terms"]
    divisors: Float[Array, " terms"]
    counts: dict[str, Array]


def gradients(
    terms: Callable[[Any, Blocks], Totals], params: Any, blocks: Blocks, accumulate: int
) -> tuple[Any, Float[Array, ""], dict[str, Array]]:
    """Gradients and value of a batch's loss, and its counts.

    In `accumulate` parts, one after the other, whose numerators and divisors are added up before any
    division: so the parts make no difference. A part takes every so many-th row, not neighbours: where
    devices hold rows, they all take part in each.
    """

    def numerators(params, blocks):
        totals = terms(params, blocks)
        return totals.numerators, totals

    def one(blocks):
        value, pull, totals = jax.vjp(lambda p: numerators(p, blocks), params, has_aux=True)
        each = tuple(pull(row)[0] for row in jnp.eye(len(value)))
        return Sums(each, value, totals.divisors, counts_of(totals, blocks))

    if accumulate == 1:  # the divisors are known before the backward pass, which runs once
        _, pull, totals = jax.vjp(lambda p: numerators(p, blocks), params, has_aux=True)
        return pull(1 / totals.safe_divisors)[0], totals.loss, counts_of(totals, blocks)

    def split(x):
        return jnp.moveaxis(x.reshape(-1, accumulate, *x.shape[1:]), 1, 0)

    parts = jax.tree.map(split, blocks)
    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums = jax.lax.scan(lambda sums, x: (jax.tree.map(jnp.add, sums, one(x)), None), zeros, parts)[
        0
    ]
    shares = 1 / jnp.maximum(sums.divisors, LEAST_DIVISOR)
    grads = jax.tree.map(lambda *g: sum(x * s for x, s in zip(g, shares)), *sums.gradients)
    return grads, jnp.sum(sums.numerators * shares), sums.counts


def counts_of(totals: Totals, blocks: Blocks) -> dict[str, Array]:
    """What a step counts: labels, right ones, blocks, their accepted lengths, and what a draft cannot know."""
    counts, correct = blocks.counts, totals.correct.reshape(blocks.counts.shape)
    length, real = acceptance_length(correct, counts, blocks.real, blocks.first_slot)
    out = {"labels": counts, "correct": correct & counts}
    if totals.listed is not None:
        out["candidates_with_label"] = totals.listed.reshape(counts.shape) & counts
    if blocks.inside is not None:
        out["labels_outside"] = counts & ~blocks.inside
    return {name: jnp.sum(x) for name, x in out.items()} | {"accepted": length, "blocks": real}


@functools.partial(
    jax.jit,
    static_argnames=("module", "optimizer", "objective", "chunk", "dtype", "accumulate"),
    donate_argnames=("state",),
)
def train_step(
    state: TrainState,
    embedding: Float[Array, "V D"],
    ids: Int[Array, " V2"] | None,
    blocks: Blocks,
    *,
    module: DFlashDraftModel,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    chunk: int,
    head: Float[Array, "V D"],
    dtype: str = "float32",
    accumulate: int = 1,
) -> tuple[TrainState, dict[str, Array]]:
    """One update.

    Args:
        state: Donated.
        embedding: The target's token table, frozen.
        ids: The draft's ids that take part; `blocks.labels` index into them. None for all.
        head: The target's head `[V, D]`, frozen.
        dtype: Of the operands of products with weights; all else is float32.
        accumulate: Parts of the batch, one after the other, whose size it divides.
    """
    if ids is not None and state.d2t is not None:
        raise ValueError("a draft with a reduced vocabulary takes part with all of it: ids=None")
    blocks = in_vocabulary(blocks, state.d2t)
    rows = constrain(target_rows(head, ids, state.d2t).astype(dtype), VOCABULARY)
    mixes = isinstance(module.config.head, Domino)
    share = objective.base_share(state.step) if mixes else None

    def terms(params, blocks):
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        params = constrain(
            params, TARGET.of(module.config)
        )  # gathered in `dtype`, the gradients scattered
        params = whole(params, state.d2t)
        return block_loss(
            module, objective, chunk, params, embedding, rows, state.feature_scale, blocks, ids, share
        )[1]  # fmt: skip

    grads, loss, counted = gradients(terms, state.params, blocks, accumulate)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    metrics = counted | {
        "loss": loss,
        "accuracy": counted["correct"] / jnp.maximum(counted["labels"], 1),
        "accepted": counted["accepted"] / jnp.maximum(counted["blocks"], 1),
        "gradient_norm": optax.tree.norm(grads),
        "rows_without_anchors": jnp.sum(~blocks.real.any(axis=1)),
    }
    state = state.replace(
        step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=opt_state
    )
    return constrain(state, DRAFT.of(module.config)), constrain(metrics, EVERYWHERE)


def whole(params: Any, d2t: Int[Array, " Vd"] | None) -> Any:
    """All of a draft's parameters, of those that train."""
    return params if d2t is None else {**params, "d2t": d2t}


def target_rows(
    head: Float[Array, "V D"], ids: Int[Array, " V2"] | None, d2t: Int[Array, " Vd"] | None
) -> Float[Array, "V2 D"]:
    """The target's head rows of the ids that take part: of `ids`, a reduced vocabulary, or all."""
    return rows_of(head, ids if d2t is None else target_ids(d2t))


def in_vocabulary(blocks: Blocks, d2t: Int[Array, " Vd"] | None) -> Blocks:
    """Blocks whose labels are token ids, with the draft's ids for labels if it has its own."""
    if d2t is None:
        return blocks
    labels, inside = draft_labels(blocks.labels, d2t)
    return blocks.replace(labels=labels, inside=inside)
