"""What an objective is made of: losses of logits, the slots' weights, and what divides their sum."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

# Losses: (draft logits [V c], labels [c], target logits [V c]) -> loss of each column [c].


def cross_entropy(
    logits: Float[Array, "V c"], labels: Int[Array, " c"], teacher: Any = None
) -> Float[Array, " c"]:
    """-log p(label), the label a token of the data."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels, axis=0)


def target_cross_entropy(
    logits: Float[Array, "V c"], labels: Int[Array, " c"], teacher: Float[Array, "V c"]
) -> Float[Array, " c"]:
    """-log p(the target's argmax) over the head rows that take part; labels are not used, here and below.

    Source: speculators 0.9.0 `losses/eager.py`, as of the losses below.
    """
    return cross_entropy(logits, likeliest(teacher))


def kl_divergence(
    logits: Float[Array, "V c"],
    labels: Int[Array, " c"],
    teacher: Float[Array, "V c"],
    temperature: float = 1.0,
) -> Float[Array, " c"]:
    """KL(target || draft); at a temperature T, T^2 times that of both logits over T.

    Source: for T, NeMo Automodel `components/loss/kd_loss.py` (JetSpec, arXiv 2606.18394, equations 8 and 9).
    """
    log_p, log_q = _log_softmax(logits / temperature), _log_softmax(teacher / temperature)
    return temperature**2 * _kl(log_q, log_p)


def reverse_kl(
    logits: Float[Array, "V c"], labels: Int[Array, " c"], teacher: Float[Array, "V c"]
) -> Float[Array, " c"]:
    """KL(draft || target)."""
    return _kl(_log_softmax(logits), _log_softmax(teacher))


def js_divergence(
    logits: Float[Array, "V c"], labels: Int[Array, " c"], teacher: Float[Array, "V c"]
) -> Float[Array, " c"]:
    """Jensen-Shannon: the mean of KL(target || m) and KL(draft || m), m halfway between the two."""
    log_p, log_q = _log_softmax(logits), _log_softmax(teacher)
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return 0.5 * (_kl(log_q, log_m) + _kl(log_p, log_m))


def total_variation(
    logits: Float[Array, "V c"], labels: Int[Array, " c"], teacher: Float[Array, "V c"]
) -> Float[Array, " c"]:
    """1 - overlap: how often rejection sampling rejects."""
    return 1 - _overlap(logits, teacher)


def negative_log_acceptance(
    logits: Float[Array, "V c"], labels: Int[Array, " c"], teacher: Float[Array, "V c"]
) -> Float[Array, " c"]:
    """-log overlap, of an overlap of at least 1e-5."""
    return -jnp.log(jnp.maximum(_overlap(logits, teacher), 1e-5))


def lk_hybrid(
    logits: Float[Array, "V c"],
    labels: Int[Array, " c"],
    teacher: Float[Array, "V c"],
    eta: float = 3.0,
) -> Float[Array, " c"]:
    """KL(target || draft) where the two hardly overlap, total variation where they do (arXiv 2602.23881)."""
    overlap = _overlap(logits, teacher)
    share = jnp.exp(-eta * jax.lax.stop_gradient(overlap))
    return share * kl_divergence(logits, labels, teacher) + (1 - share) * (1 - overlap)


def likeliest(logits: Float[Array, "V c"]) -> Int[Array, " c"]:
    """The argmax of each column, the first one among equals; V where a column has NaN.

    As a maximum and a search for it: XLA's CPU backend runs an argmax along the leading axis as a scalar
    loop, and a chunk of ids at a time (`sampling.argmax`) would gather a vocabulary that lies on several
    devices.
    """
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    return jnp.min(jnp.where(logits == logits.max(axis=0, keepdims=True), ids, len(logits)), axis=0)


_log_softmax = functools.partial(jax.nn.log_softmax, axis=0)


def _kl(log_p: Float[Array, "V c"], log_q: Float[Array, "V c"]) -> Float[Array, " c"]:
    """KL(p || q)."""
    return optax.losses.kl_divergence_with_log_targets(log_q, log_p, axis=0)


def _overlap(logits: Float[Array, "V c"], teacher: Float[Array, "V c"]) -> Float[Array, " c"]:
    """Sum of min(p, q): how often rejection sampling accepts."""
    p, q = jax.nn.softmax(logits, axis=0), jax.nn.softmax(teacher, axis=0)
    return jnp.minimum(p, q).sum(axis=0)


LOSSES: dict[str, Callable[[Array, Array, Any], Array]] = {
    loss.__name__: loss
    for loss in (
        cross_entropy, target_cross_entropy, kl_divergence, reverse_kl, js_divergence, total_variation,
        negative_log_acceptance, lk_hybrid,
    )
}  # fmt: skip
OF_THE_DATA = {"cross_entropy"}  # the others read the target's logits
OF_ONE_TOKEN = {"cross_entropy", "target_cross_entropy"}


# Weights of a block's slots.


def decay_weights(slot: Int[Array, "..."], gamma: float) -> Float[Array, "..."]:
    """exp(-slot / gamma), and 0 before slot 0, the first that is predicted.

    Source: arXiv 2602.06036, section 4 (gamma 7, 5, 4 for blocks of 16, 10, 8); restarted behind a visible
    prefix as in D2SD (arXiv 2606.04446).
    """
    return jnp.where(slot >= 0, jnp.exp(-jnp.maximum(slot, 0) / gamma), 0.0)


def reach_weights(
    confidence: Float[Array, "B A Q"], counts: Bool[Array, "B A Q"], alpha: float
) -> Float[Array, "B A Q"]:
    """Smoothed probability that all counting slots up to this one are right; D-PACE's one half.

    Source: specforge 0.2.0 `dflash_family_model.py`, "dpace-cumulative-confidence-only".
    """
    return jnp.cumprod(jnp.where(counts, (1 - alpha) * confidence + alpha, 1.0), axis=2)


def dpace_weights(
    confidence: Float[Array, "B A Q"], counts: Bool[Array, "B A Q"], alpha: float
) -> Float[Array, "B A Q"]:
    """D-PACE (arXiv 2605.18810): what a slot adds to the expected accepted length, by its log-probability.

    The sum, over the counting slots from this one on, of `reach_weights`.

    Args:
        confidence: The draft's probability of each slot's token; taken as a constant.
        counts: Slots that are supervised; the others are 1 in the product and 0 in the sum.
        alpha: 0 takes the confidence as it is, 1 as certainty.

    Source: speculators 0.9.0 `losses/utils.py`; specforge 0.2.0 `dflash_family_model.py`.
    """
    return jax.lax.cumsum(reach_weights(confidence, counts, alpha) * counts, axis=2, reverse=True)


def continuation_weights(
    confidence: Float[Array, "B A Q"], counts: Bool[Array, "B A Q"], alpha: float
) -> Float[Array, "B A Q"]:
    """D-PACE's other half: `dpace_weights` given that the slot is reached and right.

    Source: specforge 0.2.0 `dflash_family_model.py`, "dpace-continuation-value-only".
    """
    reach = reach_weights(confidence, counts, alpha)
    return dpace_weights(confidence, counts, alpha) / jnp.maximum(
        reach, jnp.finfo(jnp.float32).tiny
    )


# (gamma, alpha; slot from the first predicted one on, counts, confidence, each [B A Q]) -> weights [B A Q]
WEIGHTS: dict[str, Callable[[float, float, Array, Array, Array], Array]] = {
    "decay": lambda gamma, alpha, slot, counts, q: decay_weights(slot, gamma),
    "none": lambda gamma, alpha, slot, counts, q: jnp.ones(counts.shape),
    "dpace": lambda gamma, alpha, slot, counts, q: dpace_weights(q, counts, alpha),
    "dpace_reach": lambda gamma, alpha, slot, counts, q: reach_weights(q, counts, alpha),
    "dpace_continuation": lambda gamma, alpha, slot, counts, q: continuation_weights(
        q, counts, alpha
    ),
}

# (weights, counts) -> what divides the weighted sum, if it is not 0. NeMo and SpecForge divide by the weights, speculators
# by the count: with one gamma, smaller gradients there. SpecForge's D-PACE divides by the sequences.
NORMALIZERS: dict[str, Callable[[Array, Array], Array]] = {
    "weights": lambda weights, counts: weights.sum(),
    "count": lambda weights, counts: counts.sum().astype(jnp.float32),
    "sequences": lambda weights, counts: jnp.float32(len(counts)),
}
