"""Training objectives: losses over the vocabulary in chunks, the slots' weights, and what divides their sum."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.sampling import argmax
from train.heads import Readout, selector_loss

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


# (objective, slot from the first predicted one on, counts, confidence), each [B A Q], -> weights [B A Q]
WEIGHTS: dict[str, Callable[["Objective", Array, Array, Array], Array]] = {
    "decay": lambda o, slot, counts, q: decay_weights(slot, o.gamma),
    "none": lambda o, slot, counts, q: jnp.ones(counts.shape),
    "dpace": lambda o, slot, counts, q: dpace_weights(q, counts, o.alpha),
    "dpace_reach": lambda o, slot, counts, q: reach_weights(q, counts, o.alpha),
    "dpace_continuation": lambda o, slot, counts, q: continuation_weights(q, counts, o.alpha),
}

# (weights, counts) -> what divides the weighted sum, if it is not 0. NeMo and SpecForge divide by the weights, speculators
# by the count: with one gamma, smaller gradients there. SpecForge's D-PACE divides by the sequences.
NORMALIZERS: dict[str, Callable[[Array, Array], Array]] = {
    "weights": lambda weights, counts: weights.sum(),
    "count": lambda weights, counts: counts.sum().astype(jnp.float32),
    "sequences": lambda weights, counts: jnp.float32(len(counts)),
}


# A token that is not among DFlash 2's candidates: leaves its slot out of the selector's loss, or stands
# there for the last candidate.
SELECTOR_MISSING = ("skip", "replace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What a step minimises; hashable.

    Attributes:
        mixture: (name in `LOSSES`, its share) pairs.
        weights: Of the slots, a name in `WEIGHTS`.
        gamma: Of "decay".
        alpha: Of "dpace" and its halves, in [0, 1].
        temperature: Of "kl_divergence".
        normalize: What divides the weighted sum, a name in `NORMALIZERS`.
        base_steps: Of Domino: its loss without the correction has a share that falls from 1 to 0 over so
            many steps.
        selector_weight: Of DFlash 2's loss of choosing among candidates.
        selector_missing: What a token that is no candidate does there, see `SELECTOR_MISSING`.
    """

    mixture: tuple[tuple[str, float], ...] = (("cross_entropy", 1.0),)
    weights: str = "decay"
    gamma: float = 4.0
    alpha: float = 0.5
    temperature: float = 1.0
    normalize: str = "weights"
    base_steps: int = 0
    selector_weight: float = 1.0
    selector_missing: str = "skip"

    def __post_init__(self):
        """Raises ValueError for an unknown name, and for D-PACE without a token to be confident of."""
        names = {name for name, _ in self.mixture}
        for field, given, known in (
            ("mixture", names, LOSSES), ("weights", {self.weights}, WEIGHTS), ("normalize", {self.normalize}, NORMALIZERS),
            ("selector_missing", {self.selector_missing}, SELECTOR_MISSING),
        ):  # fmt: skip
            if not given or not given <= set(known):
                raise ValueError(f"{field}={getattr(self, field)!r} must be of {sorted(known)}")
        if self.weights.startswith("dpace") and not names & OF_ONE_TOKEN:
            raise ValueError(
                f"weights={self.weights!r} needs one of {sorted(OF_ONE_TOKEN)} in the mixture, not only {sorted(names)}"
            )

    @property
    def needs_teacher(self) -> bool:
        return any(name not in OF_THE_DATA for name, _ in self.mixture)

    @property
    def needs_labels(self) -> bool:
        return any(name in OF_THE_DATA for name, _ in self.mixture)

    def base_share(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Domino's share of the loss without the correction, at step `step` (from 0).

        Source: specforge 0.2.0 `training/strategies/base.py`.
        """
        return jnp.clip(1.0 - step / max(self.base_steps, 1), 0.0, 1.0) * (self.base_steps > 0)


PLAIN = Readout()


class Rows(NamedTuple):
    """Of each row: its loss, the draft's confidence in the token, and whether what it proposes is the label.

    With both cross-entropies in the mixture the confidence is their geometric mean; with neither, it is 1.
    Of DFlash 2 also the selector's loss, and whether its token is among the candidates.
    """

    loss: Float[Array, " R"]
    confidence: Float[Array, " R"]
    correct: Bool[Array, " R"]
    selector: Float[Array, " R"] | None = None
    listed: Bool[Array, " R"] | None = None


def vocabulary_loss(
    objective: Objective,
    hidden: Float[Array, "D R"],
    head: Float[Array, "V D"],
    labels: Int[Array, " R"],
    teacher: Float[Array, "D R"] | None = None,
    *,
    chunk: int,
    sequences: int = 1,
    read: Readout = PLAIN,
    base_share: Float[Array, ""] | None = None,
    learns: bool = True,
) -> Rows:
    """Losses of R rows without ever holding R columns of logits.

    Rows go through the head `chunk` at a time. Where nothing but the hidden states learns, a chunk's
    gradient by them is taken while its logits are there: a row's loss depends on its own state alone, so
    the backward pass only scales it. Else the backward pass computes each chunk's logits again.

    Args:
        objective: Its mixture and temperature.
        hidden: The draft's hidden states.
        head: The draft's head, or the rows of it that take part; `labels` index into it.
        labels: Of each row; anything legal where the row does not count.
        teacher: The target's normed hidden states at the same predictions, where a loss needs them.
        chunk: Rows at a time; R need not be a multiple.
        read: What else lies between states and logits.
        base_share: Of a loss without the draft head's correction in that with it; None is 0.
        learns: Whether gradients by `head` are asked for.
        sequences: Whose rows follow one another, the same number each. A chunk has rows of all of them, at
            least one, so that where devices hold sequences they all take part in each.

    Raises:
        ValueError: If a loss needs a teacher and there is none.
    """
    if objective.needs_teacher and teacher is None:
        raise ValueError(f"mixture={objective.mixture} needs the target's hidden states")
    each = hidden.shape[1] // sequences
    size = min(max(chunk // sequences, 1), each)

    def split(x):
        x = x.reshape(*x.shape[:-1], sequences, each)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -each % size)])
        x = jnp.moveaxis(x.reshape(*x.shape[:-1], -1, size), -2, 0)
        return x.reshape(*x.shape[:-2], -1)

    def join(x):
        x = jnp.moveaxis(x.reshape(*x.shape[:-1], sequences, size), 0, -2)
        x = x.reshape(*x.shape[:-2], -1)[..., :each]
        return x.reshape(*x.shape[:-2], -1)

    def one(rows):
        h, columns, label, t = rows
        logits = read.logits(head, h)
        target = None if t is None else read.target_logits(head, t)
        if read.candidates:
            return _selected(objective, read, logits, columns, label, target)
        return _corrected(objective, read, logits, columns, label, target, base_share)

    def with_gradient(rows):
        h, *others = rows

        def loss_of(h):
            out = one((h, *others))
            return out.loss, out

        _, pull, out = jax.vjp(loss_of, h, has_aux=True)
        return out, pull(jnp.ones_like(out.loss))[0]

    rows = jax.tree.map(split, (hidden, read.columns, labels, teacher))
    if learns or read.columns is not None:
        return jax.tree.map(join, jax.lax.map(jax.checkpoint(one), rows))
    rows = jax.lax.map(with_gradient, jax.lax.stop_gradient(rows))
    out, gradient = jax.tree.map(join, rows)
    return out._replace(loss=_given_gradient(hidden, out.loss, gradient))


@jax.custom_vjp
def _given_gradient(
    hidden: Float[Array, "D R"], loss: Float[Array, " R"], gradient: Float[Array, "D R"]
) -> Float[Array, " R"]:
    """`loss`, each of which depends on its own column of `hidden` by its column of `gradient`."""
    return loss


_given_gradient.defvjp(
    lambda hidden, loss, gradient: (loss, gradient),
    lambda gradient, g: (gradient * g[None], None, None),
)


def likeliest(logits: Float[Array, "V c"]) -> Int[Array, " c"]:
    """The argmax of each column; see `sampling.argmax`."""
    return argmax(logits[:, None])[0]


def _corrected(
    objective: Objective,
    read: Readout,
    logits: Float[Array, "V c"],
    columns: Float[Array, "X c"] | None,
    labels: Int[Array, " c"],
    target: Float[Array, "V c"] | None,
    base_share: Float[Array, ""] | float | None,
) -> Rows:
    """Of a chunk: the mixture's loss of the corrected logits, and its share of the logits before."""
    final = logits if columns is None else read.corrected(logits, columns)
    loss, confidence = _mixed(objective, final, labels, target)
    if base_share is not None:
        base, _ = _mixed(objective, logits, labels, target)
        loss = (1 - base_share) * loss + base_share * base
    return Rows(loss, confidence, likeliest(final) == labels)


def _selected(
    objective: Objective,
    read: Readout,
    logits: Float[Array, "V c"],
    columns: Float[Array, "X c"],
    labels: Int[Array, " c"],
    target: Float[Array, "V c"] | None,
) -> Rows:
    """Of a chunk of DFlash 2: the mixture's loss of the logits, and the selector's of the mixture's token."""
    loss, confidence = _mixed(objective, logits, labels, target)
    of_target = not objective.needs_labels and target is not None
    token = likeliest(target) if of_target else labels
    replace = objective.selector_missing == "replace"
    selector, listed, chosen = selector_loss(read, logits, columns, token, replace)
    return Rows(loss, confidence, chosen == labels, selector, listed)


def _mixed(
    objective: Objective, logits: Array, labels: Array, target: Array | None
) -> tuple[Float[Array, " c"], Float[Array, " c"]]:
    """The mixture's loss and the draft's confidence of each column."""
    tempered = functools.partial(kl_divergence, temperature=objective.temperature)
    losses = LOSSES | {"kl_divergence": tempered}
    each = [(n, share, losses[n](logits, labels, target)) for n, share in objective.mixture]
    token = [(share, value) for n, share, value in each if n in OF_ONE_TOKEN]
    zero = jnp.zeros(labels.shape)
    loss = sum((share * value for _, share, value in each), zero)
    surprise = sum((share * value for share, value in token), zero)
    mean = surprise / jnp.maximum(sum(share for share, _ in token), 1e-6)
    return loss, jnp.exp(-jax.lax.stop_gradient(mean))


LEAST_DIVISOR = 1e-6  # where nothing counts


class Totals(NamedTuple):
    """Sums over a batch's rows, and each row's correctness.

    The loss is the sum of `numerators` over `divisors`: the mixture's, and for DFlash 2 the selector's.
    """

    numerators: Float[Array, " terms"]
    divisors: Float[Array, " terms"]
    weight: Float[Array, ""]
    correct: Bool[Array, " R"]
    listed: Bool[Array, " R"] | None = None

    @property
    def safe_divisors(self) -> Float[Array, " terms"]:
        return jnp.maximum(self.divisors, LEAST_DIVISOR)

    @property
    def loss(self) -> Float[Array, ""]:
        return jnp.sum(self.numerators / self.safe_divisors)


def weighted(
    objective: Objective, rows: Rows, first: Int[Array, "B A"], counts: Bool[Array, "B A Q"]
) -> tuple[Float[Array, ""], Totals]:
    """The loss of a batch's slots, weighted and normalised; 0 where nothing counts.

    Args:
        rows: Of all slots, R = B * A * Q.
        first: Slot of each block that is predicted first; the weights start there.
        counts: Which slots are supervised.
    """
    slot = jnp.arange(counts.shape[2], dtype=first.dtype)[None, None] - first[:, :, None]
    confidence = rows.confidence.reshape(counts.shape)
    weights = WEIGHTS[objective.weights](objective, slot, counts, confidence) * counts
    divisor = NORMALIZERS[objective.normalize]
    numerators = [jnp.sum(weights * rows.loss.reshape(counts.shape))]
    divisors = [divisor(weights, counts)]
    if rows.selector is not None:
        assert rows.listed is not None
        learns = counts
        if objective.selector_missing == "skip":
            learns = counts & rows.listed.reshape(counts.shape)
        of_selector = jnp.sum(weights * learns * rows.selector.reshape(counts.shape))
        numerators.append(objective.selector_weight * of_selector)
        divisors.append(divisor(weights * learns, learns))
    totals = Totals(
        jnp.stack(numerators), jnp.stack(divisors), weights.sum(), rows.correct, rows.listed
    )
    return totals.loss, totals


def acceptance_length(
    correct: Bool[Array, "B A Q"],
    counts: Bool[Array, "B A Q"],
    real: Bool[Array, "B A"],
    first_slot: int = 1,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Teacher-forced acceptance: sum over real blocks of (matching prefix + 1), and their number.

    The prefix begins at `first_slot`; slots that do not count end it.

    Source: NeMo Automodel `components/speculative/dflash/core.py`, `accept_len`.
    """
    agree = (
        jnp.cumprod((correct & counts)[:, :, first_slot:], axis=2, dtype=jnp.int32).sum(axis=2) + 1
    )
    return jnp.sum(jnp.where(real, agree, 0)).astype(jnp.float32), jnp.sum(real).astype(jnp.float32)
