"""One optimiser step of a draft: loss over sampled anchors, gradients, update. Pure and jitted."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import DraftConfig
from dflash_jax.models import apply
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.sharding import DRAFT, EVERYWHERE, TARGET, VOCABULARY, constrain
from train.anchors import block_labels
from train.losses import Objective, Totals, vocabulary_loss, weighted


class TrainState(struct.PyTreeNode):
    """What a checkpoint holds.

    Attributes:
        step: Updates so far; it alone determines the data position and every key.
        params: The draft's parameters, float32, with `fc` acting on scaled features.
        opt_state: optax's state.
        feature_scale: What each channel of the taps is multiplied with before `fc`.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    feature_scale: Float[Array, " CD"]


class Blocks(struct.PyTreeNode):
    """A batch with its anchors; see `data.Batch` and `anchors.py`.

    Attributes:
        features: `[B, S, C * D]`.
        teacher: The target's normed last hidden states `[B, S, D]`, where the objective needs them.
        tokens: Ids `[B, A, Q]` of the positions that the blocks cover.
        anchors: Positions `[B, A]` in the row.
        first: Slot `[B, A]` of each block that is predicted first: 1, or more behind a visible prefix.
        labels: Ids `[B, A, Q]`, as indices into the head rows that take part.
        counts: Which labels count.
        real: Which anchors are real.
        documents: Of packed rows, the document of each position, negative for padding.
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

    @property
    def anchor_tokens(self) -> Int[Array, "B A"]:
        return self.tokens[:, :, 0]


def check_trainable(config: DraftConfig) -> None:
    """Raises ValueError for a draft whose logits or labels the objectives here would get wrong."""
    plain = {
        "output_multiplier": 1.0, "final_logit_softcapping": None, "sample_from_anchor": False, "own_head": False,
        "own_embedding": False, "head": None,
    }  # fmt: skip
    others = [f"{k}={getattr(config, k)!r}" for k, v in plain.items() if getattr(config, k) != v]
    if others:
        raise ValueError(f"drafts with {', '.join(others)} cannot be trained or evaluated yet")


def block_hidden(
    module: DFlashDraftModel,
    params: Any,
    embedding: Float[Array, "V D"],
    feature_scale: Float[Array, " CD"],
    blocks: Blocks,
) -> Float[Array, "D B T"]:
    """The draft's hidden states `[D, B, A * Q]` of every block.

    Raises:
        ValueError: For a draft with knobs that only decoding knows.
    """
    check_trainable(module.config)
    B, A, Q = blocks.labels.shape
    seen = jnp.arange(Q)[None, None] < blocks.first[:, :, None]
    ids = jnp.where(seen, blocks.tokens, module.config.mask_token_id)
    x = embedding[ids.reshape(B, A * Q)].transpose(2, 0, 1) * module.config.input_embedding_scale
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
) -> tuple[Float[Array, ""], Totals]:
    """The objective over the counting slots, and its parts."""
    hidden = block_hidden(module, params, embedding, feature_scale, blocks)
    return hidden_loss(objective, chunk, hidden, head, blocks)


def hidden_loss(
    objective: Objective,
    chunk: int,
    hidden: Float[Array, "D B T"],
    head: Float[Array, "V2 D"],
    blocks: Blocks,
) -> tuple[Float[Array, ""], Totals]:
    """`block_loss` from the draft's hidden states `[D, B, A * Q]` on.

    Raises:
        ValueError: If the objective needs the target's states and the blocks have none.
    """
    rows = vocabulary_loss(
        objective, hidden.reshape(len(hidden), -1), head, blocks.labels.reshape(-1), _teacher_rows(blocks), chunk=chunk,
        sequences=len(blocks.labels),
    )  # fmt: skip
    return weighted(objective, rows, blocks.first, blocks.counts)


def _teacher_rows(blocks: Blocks) -> Float[Array, "D R"] | None:
    """The target's states that predict the labels: slot k's is that of position anchor + k - 1."""
    if blocks.teacher is None:
        return None
    B, S, D = blocks.teacher.shape
    slot = jnp.arange(blocks.labels.shape[2], dtype=blocks.anchors.dtype)
    position = blocks.anchors[:, :, None] + slot[None, None] - 1
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
) -> Blocks:
    """The blocks of given anchors, labels as token ids; slots before `first` are seen and do not count."""
    labels, counts = block_labels(tokens, supervised, anchors, real, block_size, documents)
    first = jnp.ones_like(anchors) if first is None else first
    counts = counts & (jnp.arange(block_size)[None, None] >= first[:, :, None])
    return Blocks(features, teacher, labels, anchors, first, labels, counts, real, documents)


@functools.partial(
    jax.jit,
    static_argnames=("module", "optimizer", "objective", "chunk", "dtype"),
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
) -> tuple[TrainState, dict[str, Array]]:
    """One update.

    Args:
        state: Donated.
        embedding: The target's token table, frozen.
        ids: Head rows that take part; `blocks.labels` index into them. None for all.
        head: The target's head `[V, D]`, frozen.
        dtype: Of the operands of products with weights; all else is float32.
    """
    rows = constrain((head if ids is None else head[ids]).astype(dtype), VOCABULARY)

    def loss_fn(params):
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        params = constrain(params, TARGET)  # gathered in `dtype`, the gradients scattered
        return block_loss(
            module, objective, chunk, params, embedding, rows, state.feature_scale, blocks
        )

    (loss, totals), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    counted = blocks.counts.reshape(-1)
    metrics = {
        "loss": loss,
        "accuracy": jnp.sum(totals.correct & counted) / jnp.maximum(jnp.sum(counted), 1),
        "gradient_norm": optax.tree.norm(grads),
        "labels": jnp.sum(counted),
    }
    state = state.replace(
        step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=opt_state
    )
    return constrain(state, DRAFT), constrain(metrics, EVERYWHERE)
