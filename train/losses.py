"""Training objectives: weights over a block's slots, and the vocabulary loss in chunks."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.ops.product import product

# (draft logits [V c], labels [c], target logits [V c] or None) -> loss of each column [c]
Objective = Callable[[Array, Array, Array | None], Array]


def decay_weights(block_size: int, gamma: float | None) -> Float[Array, " Q"]:
    """Slot k's weight exp(-(k-1)/gamma), 0 for the anchor's slot; without gamma, 1.

    Source: arXiv 2602.06036, section 4 (gamma 7, 5, 4 for blocks of 16, 10, 8).
    """
    slot = jnp.arange(block_size)
    weights = jnp.ones(block_size) if gamma is None else jnp.exp(-(slot - 1) / gamma)
    return jnp.where(slot > 0, weights, 0.0)


def cross_entropy(
    logits: Float[Array, "V c"], labels: Int[Array, " c"], teacher: Float[Array, "V c"] | None
) -> Float[Array, " c"]:
    """-log p(label)."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels, axis=0)


def kl_divergence(
    logits: Float[Array, "V c"], labels: Int[Array, " c"], teacher: Float[Array, "V c"] | None
) -> Float[Array, " c"]:
    """KL(target || draft) over the head rows that take part; labels are not used.

    Source: speculators 0.9.0 `losses/eager.py`.
    """
    if teacher is None:
        raise ValueError("kl_divergence needs the target's hidden states")
    log_draft, log_target = jax.nn.log_softmax(logits, axis=0), jax.nn.log_softmax(teacher, axis=0)
    return optax.losses.kl_divergence_with_log_targets(log_draft, log_target, axis=0)


OBJECTIVES: dict[str, Objective] = {"cross_entropy": cross_entropy, "kl_divergence": kl_divergence}


class Totals(NamedTuple):
    """Sums over rows, to be divided by the caller."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    correct: Bool[Array, " R"]


def vocabulary_loss(
    mixture: tuple[tuple[str, float], ...],
    hidden: Float[Array, "D R"],
    head: Float[Array, "V D"],
    labels: Int[Array, " R"],
    weights: Float[Array, " R"],
    teacher: Float[Array, "D R"] | None = None,
    *,
    chunk: int,
) -> Totals:
    """Weighted loss of R rows without ever holding R columns of logits.

    Rows go through the head `chunk` at a time; the backward pass computes each chunk's logits again
    instead of keeping them.

    Args:
        mixture: (objective's name, its share) pairs.
        hidden: The draft's hidden states.
        head: The target's head, or the rows of it that take part; `labels` index into it.
        labels: Of each row; anything legal where the weight is 0.
        weights: Of each row.
        teacher: The target's normed hidden states at the same predictions, where an objective needs them.
        chunk: Rows at a time; R need not be a multiple.

    Returns:
        Sum of weight x loss, sum of weights, and where the draft's argmax is the label.
    """
    R = hidden.shape[1]
    chunk = min(chunk, R)
    pad = -R % chunk

    def split(x):
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)])
        return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, chunk), -2, 0)

    @jax.checkpoint
    def one(rows):
        h, label, weight, t = rows
        logits = product(head, h[:, None])[:, 0]
        target = None if t is None else product(head, t[:, None])[:, 0]
        loss = sum(share * OBJECTIVES[name](logits, label, target) for name, share in mixture)
        return jnp.sum(weight * loss), jnp.argmax(logits, axis=0) == label

    rows = (
        split(hidden),
        split(labels),
        split(weights),
        None if teacher is None else split(teacher),
    )
    loss, correct = jax.lax.map(one, rows)
    return Totals(loss.sum(), weights.sum(), correct.reshape(-1)[:R])


def acceptance_length(
    correct: Bool[Array, "B A Q"], counts: Bool[Array, "B A Q"], real: Bool[Array, "B A"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Teacher-forced acceptance: sum over real blocks of (matching prefix + 1), and their number.

    Slots that do not count end the prefix.

    Source: NeMo Automodel `components/speculative/dflash/core.py`, `accept_len`.
    """
    agree = jnp.cumprod((correct & counts)[:, :, 1:], axis=2, dtype=jnp.int32).sum(axis=2) + 1
    return jnp.sum(jnp.where(real, agree, 0)).astype(jnp.float32), jnp.sum(real).astype(jnp.float32)
