"""Which proposals the target keeps, and its token behind them. Pure; knows no model."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax import array_typing as at
from dflash_jax.sampling import (
    ACCEPT,
    TARGET,
    Proposals,
    RowSampling,
    Verify,
    probabilities,
    sample,
    uniform,
)


def num_accepted(drafted: Int[Array, "B P"], predicted: Int[Array, "B Q"]) -> Int[Array, " B"]:
    """Length, 0..P, of the longest drafted prefix that equals the target's own choices.

    Args:
        drafted: Proposals for block slots 1..Q-1.
        predicted: The target's choice after each block slot; `predicted[:, k]` follows slot k, so it
            is compared with `drafted[:, k]`.

    Source: greedy verification in dflash 0.1.0 `dflash_generate`.
    """
    return prefix_length(drafted == predicted[:, :-1])


def prefix_length(kept: Array) -> Int[Array, " B"]:
    """Entries of each row before the first False."""
    return jnp.cumprod(kept, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)


def reject(
    p: Float[Array, "V B Q"],
    q: Float[Array, "V B P"],
    drafted: Int[Array, "B P"],
    uniforms: Float[Array, "B P"],
) -> tuple[Int[Array, " B"], Float[Array, "V B"]]:
    """Speculative sampling (arXiv 2211.17192): proposal d stays while `u * q(d) < p(d)`.

    Args:
        p: The target's distribution after each block slot.
        q: The distribution that each proposal was drawn from.
        drafted: The proposals.
        uniforms: In [0, 1), independent of them.

    Returns:
        The number accepted, 0..P, and the distribution of the token behind them: the normalised
        positive part of p - q where one was rejected (p itself if nothing is left), p after the last slot
        if none was.

    Source: dflash 0.1.0 `_verify_block`.
    """

    def of(x):
        return jnp.take_along_axis(x, drafted[None], axis=0)[0]

    accepted = prefix_length(uniforms * of(q) < of(p[:, :, :-1]))
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 1)))  # nothing was proposed behind the last slot
    p, q = (jnp.take_along_axis(x, accepted[None, :, None], axis=2)[:, :, 0] for x in (p, q))
    residual = jnp.maximum(p - q, 0)
    total = residual.sum(axis=0, keepdims=True)
    return accepted, jnp.where(total > 0, residual / jnp.where(total > 0, total, 1), p)


def verify(
    mode: Verify, logits: at.Logits, proposals: Proposals, rows: RowSampling, anchor: at.Rows
) -> tuple[Int[Array, "B Q"], at.Rows]:
    """Judges the proposals of a block.

    Args:
        mode: See `sampling.Sampling.verify`.
        logits: The target's after each block slot, `[V, B, Q]`.
        rows: How each row samples.
        anchor: Position of each row's anchor.

    Returns:
        The tokens to append, `[B, Q]`, of which the accepted prefix and one more count; and the number
        accepted.
    """
    Q = logits.shape[2]
    positions = anchor[:, None] + 1 + jnp.arange(Q, dtype=jnp.int32)[None]
    if mode == "coupled":
        predicted = sample(logits, rows, positions)
        return predicted, num_accepted(proposals.tokens, predicted)
    drafted = proposals.tokens
    p, q = probabilities(logits, rows), dense(proposals, logits.shape[0])
    accepted, after = reject(p, q, drafted, uniform(rows, ACCEPT, positions[:, :-1]))
    last = jnp.take_along_axis(positions, accepted[:, None], axis=1)
    free = rows.replace(
        temperature=jnp.ones_like(rows.temperature),
        top_k=jnp.zeros_like(rows.top_k),
        top_p=jnp.ones_like(rows.top_p),
    )
    bonus = sample(jnp.log(after)[:, :, None], free, last, stream=TARGET)
    slot = jnp.arange(Q)[None]
    tokens = jnp.where(slot == accepted[:, None], bonus, jnp.pad(drafted, ((0, 0), (0, 1))))
    # A NaN is no probability: see `sample`.
    return jnp.where(jnp.isnan(p[0]), jnp.iinfo(jnp.int32).max, tokens), accepted


def dense(proposals: Proposals, vocab_size: int) -> Float[Array, "V B P"]:
    """The proposals' distributions over the whole vocabulary."""
    tokens, q, ids = proposals
    if q is None:
        return jax.nn.one_hot(tokens, vocab_size, axis=0)
    if ids is None:
        return q
    rows = jnp.zeros((*tokens.shape, vocab_size)), jnp.moveaxis(ids, 0, -1), jnp.moveaxis(q, 0, -1)
    return jnp.moveaxis(jnp.put_along_axis(*rows, axis=-1, inplace=False), -1, 0)
