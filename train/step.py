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
from train.anchors import block_labels
from train.losses import Totals, decay_weights, vocabulary_loss


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
        anchor_tokens: Ids `[B, A]`.
        anchors: Positions `[B, A]`.
        labels: Ids `[B, A, Q]`, as indices into the head rows that take part.
        counts: Which labels count.
        real: Which anchors are real.
    """

    features: Float[Array, "B S CD"]
    teacher: Float[Array, "B S D"] | None
    anchor_tokens: Int[Array, "B A"]
    anchors: Int[Array, "B A"]
    labels: Int[Array, "B A Q"]
    counts: Bool[Array, "B A Q"]
    real: Bool[Array, "B A"]


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
    masks = jnp.full((B, A, Q - 1), module.config.mask_token_id, jnp.int32)
    ids = jnp.concatenate([blocks.anchor_tokens[:, :, None], masks], axis=2).reshape(B, A * Q)
    x = embedding[ids].transpose(2, 0, 1) * module.config.input_embedding_scale
    context = (blocks.features.astype(jnp.float32) * feature_scale[None, None]).transpose(2, 0, 1)
    return apply(module, params, x, context, blocks.anchors, method="blocks")


def block_loss(
    module: DFlashDraftModel,
    mixture: tuple[tuple[str, float], ...],
    gamma: float | None,
    chunk: int,
    params: Any,
    embedding: Float[Array, "V D"],
    head: Float[Array, "V2 D"],
    feature_scale: Float[Array, " CD"],
    blocks: Blocks,
) -> tuple[Float[Array, ""], Totals]:
    """Mean loss over the counting slots, weighted by the decay and normalised by the weights' sum."""
    B, A, Q = blocks.labels.shape
    hidden = block_hidden(module, params, embedding, feature_scale, blocks)
    weights = decay_weights(Q, gamma)[None, None] * blocks.counts
    teacher = None
    if blocks.teacher is not None:
        # Slot k's label is what the target said after position anchor + k - 1.
        S = blocks.teacher.shape[1]
        position = (
            blocks.anchors[:, :, None] + jnp.arange(Q, dtype=blocks.anchors.dtype)[None, None] - 1
        )
        position = jnp.clip(position, 0, S - 1).reshape(B, -1, 1)
        teacher = (
            jnp.take_along_axis(blocks.teacher, position, axis=1)
            .astype(jnp.float32)
            .transpose(2, 0, 1)
            .reshape(-1, B * A * Q)
        )
    flat = (blocks.labels.reshape(-1), weights.reshape(-1))
    totals = vocabulary_loss(
        mixture, hidden.reshape(len(hidden), -1), head, *flat, teacher, chunk=chunk
    )
    return totals.loss / jnp.maximum(totals.weight, 1e-6), totals


def make_blocks(
    tokens, features, supervised, anchors, real, block_size: int, teacher=None
) -> Blocks:
    """The blocks of given anchors, labels as token ids."""
    labels, counts = block_labels(tokens, supervised, anchors, real, block_size)
    return Blocks(
        features,
        teacher,
        jnp.take_along_axis(tokens, anchors, axis=1),
        anchors,
        labels,
        counts,
        real,
    )


@functools.partial(
    jax.jit,
    static_argnames=("module", "optimizer", "mixture", "gamma", "chunk", "dtype"),
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
    mixture: tuple[tuple[str, float], ...],
    gamma: float | None,
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
    rows = (head if ids is None else head[ids]).astype(dtype)

    def loss_fn(params):
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        return block_loss(
            module, mixture, gamma, chunk, params, embedding, rows, state.feature_scale, blocks
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
    return state, metrics
