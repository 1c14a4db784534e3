import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import attention as ops
from dflash_jax.ops.mask import block_masks, causal_mask

B, K, G, H, S, T = 2, 2, 3, 8, 13, 4
N = K * G
FORMS = {"feature_major": ops._feature_major, "fused": ops._fused}


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def naive(q, k, v, mask):
    """Query head by query head, position by position, in float64."""
    q, k, v, mask = (np.asarray(x, np.float64) for x in (q, k, v, mask))
    heads, _, rows, count = q.shape
    out = np.zeros(q.shape)
    for n in range(heads):
        kv = n // (heads // k.shape[1])
        for b in range(rows):
            for t in range(count):
                visible = np.flatnonzero(mask[b, :, t])
                scores = k[b, kv, visible] @ q[n, :, b, t] / q.shape[1] ** 0.5
                weights = np.exp(scores - scores.max())
                out[n, :, b, t] = weights / weights.sum() @ v[b, kv, visible]
    return out.reshape(-1, rows, count)


def inputs(dtype=jnp.float32, kv_heads=K):
    q = draw(0, N, H, B, T, dtype=dtype)
    k, v = draw(1, B, kv_heads, S, H, dtype=dtype), draw(2, B, kv_heads, S, H, dtype=dtype)
    return q, k, v


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("window", [None, 3])
def test_both_forms_equal_the_naive_one(form, kv_heads, window):
    q, k, v = inputs(kv_heads=kv_heads)
    mask = causal_mask(jnp.asarray([[4, 5, 6, 7], [9, 10, 11, 12]], jnp.int32), S, window)
    out = jax.jit(FORMS[form])(q, k, v, mask)
    np.testing.assert_allclose(out, naive(q, k, v, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 2])
def test_bfloat16_stays_bfloat16_and_close(form, rows):
    q, k, v = inputs(jnp.bfloat16)
    q, k, v = q[:, :, :rows], k[:rows], v[:rows]
    mask = jnp.ones((rows, S, T), bool)
    out = jax.jit(FORMS[form])(q, k, v, mask)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), naive(q, k, v, mask), atol=0.03)


@pytest.mark.parametrize("form", FORMS)
def test_a_query_without_a_visible_slot_gives_no_nan_and_harms_no_other(form):
    q, k, v = inputs()
    mask = causal_mask(jnp.asarray([[4, 5, 6, 7], [9, 10, 11, 12]], jnp.int32), S)
    hole = mask.at[1, :, 2].set(False)
    whole, holed = (np.asarray(jax.jit(FORMS[form])(q, k, v, m)) for m in (mask, hole))
    assert np.isfinite(holed).all()
    others = np.ones((B, T), bool)
    others[1, 2] = False
    np.testing.assert_allclose(holed[:, others], whole[:, others], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("count", [2, 5, 8, 16])
def test_a_querys_value_does_not_depend_on_its_slot(dtype, count):
    """Bit for bit, or tokens would depend on how many proposals the draft got right."""
    heads, width, size = 3, 64, 256
    q = jnp.broadcast_to(draw(3, 2 * heads, width, 2, 1, dtype=dtype), (2 * heads, width, 2, count))
    k, v = (draw(s, 2, heads, size, width, dtype=dtype) for s in (4, 5))
    mask = jnp.broadcast_to(causal_mask(jnp.asarray([[99], [200]]), size), (2, size, count))
    out = np.asarray(jax.jit(ops.attention)(q, k, v, mask), np.float32)
    for t in range(1, count):
        np.testing.assert_array_equal(out[:, :, t], out[:, :, 0])


@pytest.mark.parametrize("anchors", [[[1, 5, 5], [3, 10, 13]], [[0, 0, 1], [13, 2, 7]]])
def test_blocks_attend_like_single_blocks_with_an_explicit_mask(anchors):
    blocks, size = 3, 4
    q, own = draw(6, N, H, B, blocks * size), [draw(s, B, K, blocks * size, H) for s in (7, 8)]
    context = [draw(s, B, K, S, H) for s in (9, 10)]
    anchors = jnp.asarray(anchors, jnp.int32)
    masks = block_masks(anchors, S, size)
    out = jax.jit(ops.block_attention)(q, *own, *context, *masks)

    slot = np.arange(S + blocks * size)[None, :, None]
    query = np.arange(blocks * size)[None, None]
    before = slot < np.repeat(np.asarray(anchors), size, axis=1)[:, None]
    mask = np.where(slot < S, before, (slot - S) // size == query // size)
    k, v = (jnp.concatenate(pair, axis=2) for pair in zip(context, own))
    np.testing.assert_allclose(out, naive(q, k, v, mask), rtol=1e-5, atol=1e-5)
    explicit = jax.jit(ops.attention)(q, k, v, jnp.asarray(mask))
    np.testing.assert_allclose(out, explicit, rtol=1e-5, atol=1e-5)

    towards = draw(11, N * H, B, blocks * size)

    def by_blocks(q, own, context):
        return (ops.block_attention(q, *own, *context, *masks) * towards).sum()

    def by_mask(q, own, context):
        k, v = (jnp.concatenate(pair, axis=2) for pair in zip(context, own))
        return (ops.attention(q, k, v, jnp.asarray(mask)) * towards).sum()

    grads, expected = (
        jax.jit(jax.grad(f, argnums=(0, 1, 2)))(q, own, context) for f in (by_blocks, by_mask)
    )
    chex.assert_trees_all_close(grads, expected, rtol=1e-5, atol=1e-5)


def test_a_block_reads_its_context_strictly_before_the_anchor_and_its_own_block():
    blocks, size, anchor = 2, 4, 6
    q, own = draw(6, N, H, 1, blocks * size), [draw(s, 1, K, blocks * size, H) for s in (7, 8)]
    context = [draw(s, 1, K, S, H) for s in (9, 10)]
    masks = block_masks(jnp.asarray([[anchor, 9]], jnp.int32), S, size)

    @functools.partial(jax.jit, static_argnums=3)
    def sensitivity(own_v, context_v, q, slot):
        """How much each value row moves the output of one slot of block 0."""

        def output(own_v, context_v):
            out = ops.block_attention(q, own[0], own_v, context[0], context_v, *masks)
            return jnp.abs(out[:, 0, slot]).sum()

        return jax.grad(output, argnums=(0, 1))(own_v, context_v)

    for slot in (0, 3):
        near, far = sensitivity(own[1], context[1], q, slot)
        assert (np.abs(far).sum(axis=(0, 1, 3)) > 0).tolist() == [s < anchor for s in range(S)]
        assert (np.abs(near).sum(axis=(0, 1, 3)) > 0).tolist() == [s < size for s in range(8)]
