"""How a token is picked from logits: temperature, top-k and top-p of each row, and keyed noise.

A sampled token is the argmax of `logits / temperature + g` over the ids that the filters keep, with
Gumbel noise `g` that depends on (the row's key, the token's absolute position, the id) and on
nothing else: not on the batch, the block, the draft, or how a run was cut into calls. Greedy
decoding is the same argmax without noise.

Filters as in dflash 0.1.0: temperature, then exactly the `top_k` largest, softmax, then the smallest
set of most likely ids whose probability reaches `top_p`.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped

from dflash_jax import array_typing as at
from dflash_jax.sharding import VOCABULARY, parts_of, top_k

CANDIDATES = 64  # ids a filter is first looked for in
CHUNK = 256  # logits of which `argmax` takes the maximum at once
# Streams of noise. Coupled verification lets the draft use the target's; `rejection` must not.
TARGET, DRAFT, ACCEPT = 0, 1, 2

Verify = Literal["coupled", "rejection", "rejection_argmax"]
VERIFY: tuple[Verify, ...] = ("coupled", "rejection", "rejection_argmax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are picked.

    Attributes:
        temperature: 0 is greedy.
        top_k: Ids that are kept; 0 keeps all.
        top_p: Probability that the kept ids reach; 1 keeps all.
        verify: How proposals are judged at temperature > 0. "coupled": the draft and the target pick
            with the same noise, and a proposal stays if both picks are equal. "rejection": Leviathan
            et al.'s rule with sampled proposals; "rejection_argmax": the same with the draft's
            likeliest tokens. All three are exact; only "coupled" gives the same text for the same key
            whatever the draft.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    verify: Verify = "coupled"

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature!r} must be at least 0, and finite")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k!r} must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r} must be in (0, 1]")
        if self.verify not in VERIFY:
            raise ValueError(f"verify={self.verify!r} must be one of {', '.join(VERIFY)}")


@no_type_check  # JAX rebuilds it around shapes and shardings too
class RowSampling(struct.PyTreeNode):
    """`Sampling` of each row, as values: none of them recompiles.

    Attributes:
        temperature, top_k, top_p: See `Sampling`.
        key: A typed key a row; never consumed, folded with positions and ids.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    key: Any


class Proposals(NamedTuple):
    """A draft's tokens, and where `rejection` needs it the distribution that they were drawn from.

    Attributes:
        tokens: Ids `[B, T]`.
        q: Probabilities `[X, B, T]`, or None for a certainty.
        ids: Token id of each entry of `q`, broadcastable to its shape; None if X is the vocabulary.
    """

    tokens: Int[Array, "B T"]
    q: Float[Array, "X B T"] | None = None
    ids: Int[Array, "..."] | None = None


def argmax(logits: at.Logits) -> Int[Array, "B T"]:
    """Index of the largest logit along the leading axis, the first one among equals.

    First the chunk that holds it, then its place in there, so that all logits are read once: XLA's CPU
    backend runs an argmax along the leading axis as a scalar loop, and a maximum with a search for it
    as four passes over memory (measured behind a head of 49,152: 6 ms of 21 for 64 columns, now 1.4).

    NaN among the logits, or infinities of both signs, give X, an index that nothing has, instead of
    passing for a token. The sum tells, since the maximum of XLA's CPU backend may skip NaN
    (jax 0.10.2: in arrays of a few thousand entries, not in small ones).
    """
    X = logits.shape[0]
    size = math.gcd(X // parts_of(X, VOCABULARY), CHUNK)  # no chunk lies on two devices
    chunks = logits.reshape(-1, size, *logits.shape[1:])
    chunk = _first_maximum(chunks.max(axis=1))
    chosen = jnp.take_along_axis(chunks, chunk[None, None], axis=0, mode="clip")[0]
    broken = jnp.isnan(chunks.sum(axis=1).sum(axis=0))
    return jnp.where(broken, X, chunk * size + _first_maximum(chosen))


def _first_maximum(x: Float[Array, "X B T"]) -> Int[Array, "B T"]:
    """`argmax` of few entries without NaN, as a maximum and a search for it."""
    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.min(jnp.where(x == x.max(axis=0, keepdims=True), ids, len(x)), axis=0)


def position_keys(rows: RowSampling, stream: int, positions: at.Positions) -> Shaped[Array, "B T"]:
    """The typed key of each (row, position) of a stream of noise."""

    def of_row(key, positions):
        return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, stream), positions)

    return jax.vmap(of_row)(rows.key, positions)


def gumbel(keys: Shaped[Array, "B T"], ids: Int[Array, "X B T"]) -> Float[Array, "X B T"]:
    """Noise of each id at each of the `position_keys`, one hash each."""

    def one(key, i):
        # The hash itself is the random number: drawing from the new key would hash once more.
        return jax.random.key_data(jax.random.fold_in(key, i))[..., 0]

    bits = jax.vmap(jax.vmap(jax.vmap(one)), (None, 0))(keys, ids)
    uniform = ((bits >> 8).astype(jnp.float32) + 0.5) * 2.0**-24
    return -jnp.log(-jnp.log(uniform))


def uniform(rows: RowSampling, stream: int, positions: at.Positions) -> Float[Array, "B T"]:
    """A number in [0, 1) of each (row, position)."""
    return jax.vmap(jax.vmap(jax.random.uniform))(position_keys(rows, stream, positions))


def scaled(logits: at.Logits, rows: RowSampling) -> at.Logits:
    """Logits over temperature; those of greedy rows as they are."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    return logits.astype(jnp.float32) / temperature[None, :, None]


def keep_of_ranked(
    ranked: Float[Array, "B T X"], log_total: Float[Array, "B T"], rows: RowSampling
) -> Bool[Array, "B T X"]:
    """Which of the largest scaled logits, in descending order, the filters keep.

    Args:
        ranked: The X largest.
        log_total: Log of the sum of exp over all, for the softmax without top-k.
    """
    rank = jnp.arange(ranked.shape[-1])[None, None]
    top_k = rows.top_k[:, None, None]
    kept = (top_k == 0) | (rank < top_k)
    inside = jax.nn.logsumexp(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    total = jnp.where(rows.top_k[:, None] > 0, inside, log_total)[..., None]
    probability = jnp.where(kept, jnp.exp(ranked - total), 0.0)
    before = jnp.cumsum(probability, axis=-1) - probability
    top_p = rows.top_p[:, None, None]
    return kept & ((before < top_p) | (top_p >= 1))


def probabilities(logits: at.Logits, rows: RowSampling) -> Float[Array, "X B T"]:
    """The filtered distribution; a greedy row's is its argmax for certain.

    Sorts all X entries: for verification by rejection, which compares whole distributions.
    """
    x = scaled(logits, rows)
    ranked, order = top_k(x.transpose(1, 2, 0), x.shape[0])
    keep = keep_of_ranked(ranked, jax.nn.logsumexp(x, axis=0), rows)
    p = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    p = jnp.put_along_axis(jnp.zeros_like(p), order, p, axis=-1, inplace=False).transpose(2, 0, 1)
    sure = jax.nn.one_hot(argmax(logits), x.shape[0], axis=0)
    return jnp.where((rows.temperature > 0)[None, :, None], p, sure)


def sample(
    logits: at.Logits,
    rows: RowSampling,
    positions: at.Positions,
    *,
    stream: int = TARGET,
    ids: Int[Array, "..."] | None = None,
) -> Int[Array, "B T"]:
    """Each row's token, greedy or sampled.

    While the filters of all sampling rows find what they keep among the `CANDIDATES` largest logits,
    noise is made for those alone, whatever the vocabulary. Without any filter it is made for all;
    a sort of all is left for a wide filter.

    Args:
        logits: `[X, B, T]`.
        positions: Of the tokens that are picked, `[B, T]`.
        stream: Of noise.
        ids: Token id of each logit, `[X]` or `[X, B, T]`; None if X is the vocabulary.

    Returns:
        Ids `[B, T]`; the vocabulary's size, or more, where the logits are NaN.
    """
    X, B, T = logits.shape
    if not T:
        return jnp.zeros((B, 0), jnp.int32)

    def id_of(index):
        index = jnp.minimum(index, X - 1)
        if ids is None or ids.ndim == 1:
            return index if ids is None else ids[index]
        return jnp.take_along_axis(ids, index[None], axis=0)[0]

    best = argmax(logits)
    greedy = jnp.where(best < X, id_of(best), jnp.iinfo(jnp.int32).max)

    def slot_by_slot(pick):
        """So that what a pick needs beside the logits is as large as one slot's."""
        named = jnp.arange(X, dtype=jnp.int32) if ids is None else ids

        def one(i):
            def column(x):
                return jax.lax.dynamic_slice_in_dim(x, i, 1, x.ndim - 1)

            token = named[:, None, None] if named.ndim == 1 else column(named)
            token = jnp.broadcast_to(token, (X, B, 1))
            return pick(column(logits), rows, column(keys), token)[:, 0]

        return id_of(jax.lax.map(one, jnp.arange(T)).T)

    keys = position_keys(rows, stream, positions)  # here, so that the program holds them once
    sampling = rows.temperature > 0
    every = jnp.all((rows.top_k == 0) & (rows.top_p >= 1) | ~sampling)
    case = jnp.where(jnp.any(sampling), jnp.where(every, 1, 2), 0)
    sampled = [functools.partial(slot_by_slot, pick) for pick in (_everywhere, _filtered)]
    tokens = jax.lax.switch(case, [lambda: greedy, *sampled])
    return jnp.where(sampling[:, None] & (best < X), tokens, greedy)


def _everywhere(
    logits: at.Logits, rows: RowSampling, keys: Shaped[Array, "B T"], token: Int[Array, "X B T"]
) -> Int[Array, "B T"]:
    """Index of the noisy maximum among all."""
    return argmax(scaled(logits, rows) + gumbel(keys, token))


def _filtered(
    logits: at.Logits, rows: RowSampling, keys: Shaped[Array, "B T"], token: Int[Array, "X B T"]
) -> Int[Array, "B T"]:
    """Index of the noisy maximum among those that the filters keep."""
    x = scaled(logits, rows)
    total = jax.nn.logsumexp(x, axis=0)
    few = min(CANDIDATES, len(x))

    def among(count):
        return _pick_filtered(x, total, rows, keys, token, count)

    if few == len(x):
        return among(few)
    return jax.lax.cond(_suffices(x, total, rows, few), lambda: among(few), lambda: among(len(x)))


def _suffices(x: at.Logits, total: Array, rows: RowSampling, count: int) -> Bool[Array, ""]:
    """Whether the `count` largest of every sampling row hold all that its filters keep."""
    top = top_k(x.transpose(1, 2, 0), count)[0]
    mass = jnp.exp(jax.nn.logsumexp(top, axis=-1) - total)
    by_rank = (rows.top_k > 0) & (rows.top_k <= count)
    by_mass = (rows.top_k == 0) & (rows.top_p < 1)
    enough = by_rank[:, None] | by_mass[:, None] & (mass >= rows.top_p[:, None])
    return jnp.all(enough | (rows.temperature <= 0)[:, None])


def _pick_filtered(
    x: at.Logits,
    total: Float[Array, "B T"],
    rows: RowSampling,
    keys: Shaped[Array, "B T"],
    token: Int[Array, "X B T"],
    count: int,
) -> Int[Array, "B T"]:
    """Index of the noisy maximum among those of the `count` largest that the filters keep."""
    ranked, order = top_k(x.transpose(1, 2, 0), count)
    chosen = jnp.take_along_axis(token.transpose(1, 2, 0), order, axis=-1)
    noise = gumbel(keys, chosen.transpose(2, 0, 1)).transpose(1, 2, 0)
    keep = keep_of_ranked(ranked, total, rows)
    pick = jnp.argmax(jnp.where(keep, ranked + noise, -jnp.inf), axis=-1)
    return jnp.take_along_axis(order, pick[..., None], axis=-1)[..., 0]


@dataclasses.dataclass(frozen=True, eq=False)
class Picker:
    """What a draft picks its proposals with; made by the decoder in each round.

    Attributes:
        rows: How each row samples.
        anchor: Position of each row's anchor; slot k stands k behind it.
        verify: How the proposals will be judged.
    """

    rows: RowSampling
    anchor: at.Rows
    verify: Verify

    def __call__(
        self, logits: at.Logits, slot: int | Int[Array, ""], ids: Int[Array, "..."] | None = None
    ) -> Proposals:
        """Proposals for the T slots from `slot` on, of logits `[X, B, T]`; see `sample` for `ids`."""
        positions = self.anchor[:, None] + slot + jnp.arange(logits.shape[2], dtype=jnp.int32)[None]
        if self.verify == "coupled":
            return Proposals(sample(logits, self.rows, positions, ids=ids))
        if self.verify == "rejection_argmax":
            greedy = self.rows.replace(temperature=jnp.zeros_like(self.rows.temperature))
            return Proposals(sample(logits, greedy, positions, ids=ids))
        q = probabilities(logits, self.rows)
        # The distribution is filtered already: what is left is a draw.
        plain = self.rows.replace(
            temperature=jnp.ones_like(self.rows.temperature),
            top_k=jnp.zeros_like(self.rows.top_k),
            top_p=jnp.ones_like(self.rows.top_p),
        )
        tokens = sample(jnp.log(q), plain, positions, stream=DRAFT, ids=ids)
        if ids is not None:
            ids = jnp.broadcast_to(ids.reshape(*ids.shape, *(1,) * (3 - ids.ndim)), q.shape)
        return Proposals(tokens, q, ids)


def join(parts: list[Proposals]) -> Proposals:
    """Proposals of neighbouring slots as one."""
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *parts)
