"""What a step minimises: a mixture of losses over the vocabulary, in chunks, weighted by slot."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from train.heads import Readout, selector_loss
from train.losses import (
    LOSSES,
    NORMALIZERS,
    OF_ONE_TOKEN,
    OF_THE_DATA,
    WEIGHTS,
    kl_divergence,
    likeliest,
)
from train.normalizer import normalizer

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

    def one(rows):
        h, columns, label, t = rows
        logits = read.logits(head, h)
        target = None if t is None else read.target_logits(head, t)
        if read.candidates:
            return _selected(objective, read, logits, columns, label, target)
        return _corrected(objective, read, logits, columns, label, target, base_share)

    rows = (hidden, read.columns, labels, teacher)
    if learns or read.columns is not None:
        return _map_chunks(jax.checkpoint(one), rows, chunk, sequences)
    of_tokens = {name for name, _ in objective.mixture} <= OF_ONE_TOKEN and read.cap is None
    f = (
        functools.partial(_of_tokens, objective, read, head)
        if of_tokens
        else functools.partial(_with_gradient, one)
    )
    out, gradient = _map_chunks(f, jax.lax.stop_gradient(rows), chunk, sequences)
    return out._replace(loss=_given_gradient(hidden, out.loss, gradient))


def _with_gradient(f: Callable[[Any], Rows], rows: Any) -> tuple[Rows, Float[Array, "D c"]]:
    """A chunk's rows, and the gradient of each one's loss by its hidden state."""

    def loss_of(hidden):
        out = f((hidden, *rows[1:]))
        return out.loss, out

    _, pull, out = jax.vjp(loss_of, rows[0], has_aux=True)
    return out, pull(jnp.ones_like(out.loss))[0]


def _map_chunks(f: Callable[[Any], Any], rows: Any, chunk: int, sequences: int) -> Any:
    """`f` of arrays `[..., R]`, of up to `chunk` of the R rows at a time; see `vocabulary_loss`."""
    each = jax.tree.leaves(rows)[0].shape[-1] // sequences
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

    return jax.tree.map(join, jax.lax.map(f, jax.tree.map(split, rows)))


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


def _of_tokens(
    objective: Objective, read: Readout, head: Float[Array, "V D"], rows: Any
) -> tuple[Rows, Float[Array, "D c"]]:
    """`_with_gradient` of a mixture of cross-entropies, a few thousand ids at a time."""
    hidden, _, labels, teacher = rows
    tokens = {"cross_entropy": labels}
    if teacher is not None:
        tokens["target_cross_entropy"] = normalizer(head, teacher, gradient=False).likeliest
    states = (read.multiplier * hidden).astype(head.dtype)
    of_all = normalizer(head, states)
    assert of_all.mean is not None
    share = dict(objective.mixture)
    whole = sum(share.values())
    row = jnp.zeros(hidden.shape)
    for name, part in share.items():
        # A target that is no number has no likeliest token: its row is none either, not another's.
        found = head.at[tokens[name]].get(mode="fill", fill_value=jnp.nan)
        row = row + part * found.astype(jnp.float32).T
    loss = whole * of_all.log - (row * states.astype(jnp.float32)).sum(axis=0)
    gradient = read.multiplier * (whole * of_all.mean - row)
    confidence = jnp.exp(-loss / whole)
    return Rows(loss, confidence, of_all.likeliest == labels), gradient


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
    weights = (
        WEIGHTS[objective.weights](objective.gamma, objective.alpha, slot, counts, confidence)
        * counts
    )
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
