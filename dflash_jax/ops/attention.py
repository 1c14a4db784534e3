"""Grouped-query attention over a cache, and its layouts. The only place that picks a form."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dflash_jax import array_typing as at

_MASKED = -1e30  # finite: a row without a visible slot gives a mean of values, not NaN


def attention(
    q: at.Queries, k: at.KeyValues, v: at.KeyValues, mask: at.Mask
) -> Float[Array, "NH B T"]:
    """Softmax(q k / sqrt(H)) v of every query head, feature-major in and out.

    Args:
        q: Rotated queries `[N, H, B, T]`; query head n reads key/value head n // G.
        k: Rotated keys `[B, K, S, H]`.
        v: Values `[B, K, S, H]`.
        mask: `[B, S, T]`, true where visible.

    Returns:
        `[N * H, B, T]` in q's dtype; scores and softmax are float32.
    """
    form = _feature_major if jax.default_backend() == "cpu" else _fused
    return form(q, k, v, mask)


def _feature_major(
    q: at.Queries, k: at.KeyValues, v: at.KeyValues, mask: at.Mask
) -> Float[Array, "NH B T"]:
    """Two products whose operands lie as XLA's CPU backend likes them, for 1 to 64 queries.

    Keys are the left operand of the first, as weights are elsewhere; its result is turned so that
    the softmax runs along contiguous slots and the weights are the left operand of the second.
    Measured against `v` on the left, at 1024 slots: 2 to 7 times faster, most for few queries.
    """
    N, H, B, T = q.shape
    K = k.shape[1]
    G = N // K
    q = q.reshape(K, G, H, B, T).transpose(3, 0, 2, 1, 4).reshape(B, K, H, G * T)
    scores = jnp.einsum("BKSH,BKHX->BKSX", k, q, preferred_element_type=jnp.float32)
    # XLA would fold the turn into the product: the other operand order, which is slower, and which
    # its CPU backend cannot run on bfloat16 for more than one row.
    scores = jax.lax.optimization_barrier(scores)
    scores = scores.swapaxes(2, 3).reshape(B, K, G, T, -1)
    scores = jnp.where(mask.swapaxes(1, 2)[:, None, None], scores * H**-0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).reshape(B, K, G * T, -1).astype(v.dtype)
    out = jnp.einsum("BKXS,BKSH->BKXH", weights, v, preferred_element_type=jnp.float32)
    out = out.astype(q.dtype)
    return out.reshape(B, K, G, T, H).transpose(1, 2, 4, 0, 3).reshape(N * H, B, T)


def _fused(
    q: at.Queries, k: at.KeyValues, v: at.KeyValues, mask: at.Mask
) -> Float[Array, "NH B T"]:
    """`jax.nn.dot_product_attention`, which accelerators fuse."""
    N, H, B, T = q.shape
    out = jax.nn.dot_product_attention(
        q.transpose(2, 3, 0, 1),
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        mask=mask.swapaxes(1, 2)[:, None],
    )
    return out.transpose(2, 3, 0, 1).reshape(N * H, B, T)


def block_attention(
    q: at.Queries,
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    context_k: at.KeyValues,
    context_v: at.KeyValues,
    far_mask: Bool[Array, "B S A X"],
    near_mask: Bool[Array, "Q Q"],
) -> Float[Array, "NH B T"]:
    """Attention of A blocks of Q slots, each over [the context that it sees ; its own block].

    One softmax over both parts; no mask or score of block against block exists, so the memory is
    A * Q * (S + Q) and not A * Q * (S + A * Q).

    Args:
        q: Queries `[N, H, B, A * Q]`, block after block.
        k, v: The blocks' own keys and values `[B, K, A * Q, H]`.
        context_k, context_v: `[B, K, S, H]`.
        far_mask: What each slot sees of the context, `[B, S, A, Q]` or `[B, S, A, 1]`.
        near_mask: What each slot sees of its block, keys first; itself at least.

    Returns:
        `[N * H, B, A * Q]`.
    """
    N, H, B, _ = q.shape
    K, A = k.shape[1], far_mask.shape[2]
    G = N // K
    q = q.reshape(K, G, H, B, A, -1)
    k, v = (x.reshape(B, K, A, -1, H) for x in (k, v))
    far = jnp.einsum("BKSH,KGHBAQ->BKSGAQ", context_k, q, preferred_element_type=jnp.float32)
    near = jnp.einsum("BKARH,KGHBAQ->BKRGAQ", k, q, preferred_element_type=jnp.float32)
    far = jnp.where(far_mask[:, None, :, None], far * H**-0.5, _MASKED)
    near = jnp.where(near_mask[None, None, :, None, None], near * H**-0.5, _MASKED)
    top = jnp.maximum(far.max(axis=2), near.max(axis=2))[:, :, None]
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    total = far.sum(axis=2) + near.sum(axis=2)
    out = jnp.einsum("BKSH,BKSGAQ->BKHGAQ", context_v, far.astype(v.dtype))
    out = out + jnp.einsum("BKARH,BKRGAQ->BKHGAQ", v, near.astype(v.dtype))
    out = (out / total[:, :, None]).astype(q.dtype)
    return out.transpose(1, 3, 2, 0, 4, 5).reshape(N * H, B, -1)
