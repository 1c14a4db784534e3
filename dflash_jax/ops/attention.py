"""Grouped-query attention over a cache, and its layouts. The only place that picks a form.

The form goes by the platform that a program is lowered for (`BY_PLATFORM`). The environment variable
`DFLASH_JAX_ATTENTION`, read at import, names one of `FORMS` for every platform instead.
"""

import functools
import os
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dflash_jax import array_typing as at

VARIABLE = "DFLASH_JAX_ATTENTION"
FEW = 6  # queries of a key head, up to which each has a product of its own
_MASKED = -1e30  # finite: a row without a visible slot gives a mean of values, not NaN
_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


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
    if CHOSEN is not None:
        return FORMS[CHOSEN](q, k, v, mask)
    # Every form is traced, once for each shape, and only the platform's own is lowered.
    by_platform = {platform: FORMS[name] for platform, name in BY_PLATFORM.items()}
    return jax.lax.platform_dependent(q, k, v, mask, default=FORMS[ELSEWHERE], **by_platform)


def _feature_major(
    q: at.Queries, k: at.KeyValues, v: at.KeyValues, mask: at.Mask
) -> Float[Array, "NH B T"]:
    """Two products whose operands lie as XLA's CPU backend likes them, for 1 to 64 queries.

    Keys are the left operand of the first, as weights are elsewhere; its result is turned so that
    the softmax runs along contiguous slots and the weights are the left operand of the second.
    Measured against `v` on the left, at 1024 slots: 2 to 7 times faster, most for few queries.
    Few queries take the second product one by one, which then reads `v` in order and packs nothing:
    0.72 of the time at 3 float32 queries and 4096 slots; as fast at 8, or in bfloat16.
    """
    N, H, B, T = q.shape
    K = k.shape[1]
    G = N // K
    q = q.reshape(K, G, H, B, T).transpose(3, 0, 2, 1, 4).reshape(B, K, H, G * T)
    scores = _dot("BKSH,BKHX->BKSX", k, q)
    # XLA would fold the turn into the product: the other operand order, which is slower, and which
    # its CPU backend cannot run on bfloat16 for more than one row.
    scores = jax.lax.optimization_barrier(scores)
    scores = scores.swapaxes(2, 3).reshape(B, K, G, T, -1)
    scores = jnp.where(mask.swapaxes(1, 2)[:, None, None], scores * H**-0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).reshape(B, K, G * T, -1).astype(v.dtype)
    few = G * T <= FEW and v.dtype == jnp.float32
    parts = jnp.split(weights, G * T, axis=2) if few else [weights]
    out = jnp.concatenate([_dot("BKXS,BKSH->BKXH", part, v) for part in parts], axis=2)
    out = out.astype(q.dtype)
    return out.reshape(B, K, G, T, H).transpose(1, 2, 4, 0, 3).reshape(N * H, B, T)


def _xla(q: at.Queries, k: at.KeyValues, v: at.KeyValues, mask: at.Mask) -> Float[Array, "NH B T"]:
    """`jax.nn.dot_product_attention` as plain products, which accelerators fuse."""
    N, H, B, T = q.shape
    out = jax.nn.dot_product_attention(
        q.transpose(2, 3, 0, 1),
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        mask=mask.swapaxes(1, 2)[:, None],
        implementation="xla",
    )
    return out.transpose(2, 3, 0, 1).reshape(N * H, B, T)


def _cudnn(
    q: at.Queries, k: at.KeyValues, v: at.KeyValues, mask: at.Mask
) -> Float[Array, "NH B T"]:
    """cuDNN's flash attention, which stops at each row's last visible slot; `_xla` for what it does not take.

    It takes bfloat16 and float16 of head widths that are multiples of 8 up to 128. Its keys are
    `[rows, S, heads, H]`; with one head each and B * K rows, that is the cache as it lies, where B
    rows of K heads would be a copy of it in every layer. On a mesh that divides the heads, merging
    the two axes moves data: `xla` is the form for that.

    The mask goes in as a bias, beside the lengths: cuDNN's own causal mask counts queries from slot 0,
    and its windows know no ring. JAX's tests run both together on GPUs.

    Source: jax 0.10.2 `check_is_flash_attention`; jax `nn_test.py` `testDotProductAttentionMask`.
    """
    N, H, B, T = q.shape
    K, S = k.shape[1:3]
    if not (
        q.dtype == k.dtype and q.dtype in (jnp.bfloat16, jnp.float16) and H % 8 == 0 and H <= 128
    ):
        return _xla(q, k, v, mask)
    slots = jnp.arange(1, S + 1, dtype=jnp.int32)
    length = jnp.where(mask.any(axis=2), slots, 1).max(axis=1)
    out = jax.nn.dot_product_attention(
        q.reshape(K, N // K, H, B, T).transpose(3, 0, 4, 1, 2).reshape(B * K, T, N // K, H),
        k.reshape(B * K, S, 1, H),
        v.reshape(B * K, S, 1, H),
        mask=jnp.repeat(mask.swapaxes(1, 2), K, axis=0)[:, None],
        key_value_seq_lengths=jnp.repeat(length, K),
        implementation="cudnn",
    )
    return out.reshape(B, K, T, N // K, H).transpose(1, 3, 4, 0, 2).reshape(N * H, B, T)


Form = Callable[[at.Queries, at.KeyValues, at.KeyValues, at.Mask], Float[Array, "NH B T"]]

FORMS: Mapping[str, Form] = {"feature_major": _feature_major, "xla": _xla, "cudnn": _cudnn}
BY_PLATFORM: Mapping[str, str] = {"cpu": "feature_major"}
ELSEWHERE = "xla"  # cuDNN's was not measured against it yet


def chosen(environment: Mapping[str, str]) -> str | None:
    """The form that the environment names, or None.

    Raises:
        ValueError: If there is no such form.
    """
    name = environment.get(VARIABLE) or None
    if name is not None and name not in FORMS:
        raise ValueError(f"{VARIABLE}={name!r} must be one of {', '.join(FORMS)}")
    return name


CHOSEN = chosen(os.environ)


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
    N, H, B, T = q.shape
    K, A = k.shape[1], far_mask.shape[2]
    G, Q = N // K, T // A
    # Query heads outermost, for a mesh that divides them.
    q = q.reshape(K, G, H, B, A, Q).transpose(3, 0, 1, 4, 5, 2)  # [B, K, G, A, Q, H]
    k, v = (x.reshape(B, K, A, Q, H) for x in (k, v))
    far = jnp.where(far_mask.transpose(0, 2, 3, 1)[:, None, None], 0, _MASKED)
    near = jnp.where(near_mask.T, 0, _MASKED)[None, None, None, None]
    out = _far_and_near(q, k, v, context_k, context_v, far, near)
    return out.astype(q.dtype).transpose(1, 2, 5, 0, 3, 4).reshape(N * H, B, T)


@jax.custom_vjp
def _far_and_near(q, k, v, context_k, context_v, far_bias, near_bias):
    """Attention `[B, K, G, A, Q, H]`, float32, of queries in that order.

    The gradient is written out so that every product takes the scores as they lie, the context last:
    JAX's own has XLA's CPU backend turn them round for the gradients of keys and values, a third of
    the draft's backward pass at 512 positions.
    """
    return _attend(q, k, v, context_k, context_v, far_bias, near_bias)[0]


def _attend(q, k, v, context_k, context_v, far_bias, near_bias):
    (B, K, *blocks, H), scale = q.shape, q.shape[-1] ** -0.5
    far = _dot("BKXH,BKHS->BKXS", q.reshape(B, K, -1, H), context_k.swapaxes(2, 3))
    far = far.reshape(B, K, *blocks, -1) * scale + far_bias
    near = _dot("BKGAQH,BKARH->BKGAQR", q, k) * scale + near_bias
    top = jnp.maximum(far.max(axis=-1), near.max(axis=-1))[..., None]
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    total = far.sum(axis=-1, keepdims=True) + near.sum(axis=-1, keepdims=True)
    far, near = (far / total).reshape(B, K, -1, far.shape[-1]), near / total
    out = _dot("BKXS,BKSH->BKXH", far.astype(v.dtype), context_v).reshape(q.shape)
    out = out + _dot("BKGAQR,BKARH->BKGAQH", near.astype(v.dtype), v)
    return out, (q, k, v, context_k, context_v, far, near, out)


def _attend_backward(saved, g):
    q, k, v, context_k, context_v, far, near, out = saved
    B, K, *_, H = q.shape
    mean = (g * out).sum(axis=-1, keepdims=True)  # of each row's gradient, by its weights
    g = g.astype(v.dtype)
    q_rows, g_rows = (x.reshape(B, K, -1, H) for x in (q, g))
    far_g = _dot("BKXH,BKHS->BKXS", g_rows, context_v.swapaxes(2, 3))
    far_g = (far * (far_g - mean.reshape(B, K, -1, 1)) * H**-0.5).astype(k.dtype)
    near_g = _dot("BKGAQH,BKARH->BKGAQR", g, v)
    near_g = (near * (near_g - mean) * H**-0.5).astype(k.dtype)
    q_g = _dot("BKXS,BKSH->BKXH", far_g, context_k).reshape(q.shape)
    q_g = q_g + _dot("BKGAQR,BKARH->BKGAQH", near_g, k)
    context_k_g = _dot("BKHX,BKXS->BKHS", q_rows.swapaxes(2, 3), far_g).swapaxes(2, 3)
    context_v_g = _dot("BKHX,BKXS->BKHS", g_rows.swapaxes(2, 3), far.astype(v.dtype)).swapaxes(2, 3)
    k_g = _dot("BKGAQR,BKGAQH->BKARH", near_g, q)
    v_g = _dot("BKGAQR,BKGAQH->BKARH", near.astype(v.dtype), g)
    grads = [(q_g, q), (k_g, k), (v_g, v), (context_k_g, context_k), (context_v_g, context_v)]
    return (*(x.astype(like.dtype) for x, like in grads), None, None)


_far_and_near.defvjp(_attend, _attend_backward)
