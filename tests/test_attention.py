import functools
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from dflash_jax.ops import attention as ops
from dflash_jax.ops.mask import block_masks, causal_mask

B, K, G, H, S, T = 2, 2, 3, 8, 13, 4
N = K * G
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 0.03}
MASKED = causal_mask(jnp.asarray([[4, 5, 6, 7], [9, 10, 11, 12]], jnp.int32), S)


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


@pytest.fixture(autouse=True)
def cudnn_calls(monkeypatch):
    """Calls of cuDNN, which needs a GPU: JAX's plain products do the work, of the same operands."""
    products, calls = jax.nn.dot_product_attention, []

    def stand_in(q, k, v, implementation, **given):
        if implementation == "cudnn":
            calls.append((q, k, v, given))
        return products(q, k, v, implementation="xla", **given)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    return calls


@pytest.mark.parametrize("form", ops.FORMS)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_form_equals_the_naive_one(form, kv_heads, dtype):
    q, k, v = inputs(dtype, kv_heads)
    attend = jax.jit(ops.FORMS[form])
    for window in (None, 3):
        mask = causal_mask(jnp.asarray([[4, 5, 6, 7], [9, 10, 11, 12]], jnp.int32), S, window)
        out = attend(q, k, v, mask)
        assert out.dtype == dtype
        expected = naive(q, k, v, mask)
        np.testing.assert_allclose(
            np.asarray(out, np.float64), expected, rtol=1e-5, atol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("form", ops.FORMS)
def test_one_row_and_a_ring_in_bfloat16(form):
    """A ring's visible slots lie in no order, and one row is a case of its own on the CPU."""
    q, k, v = (
        x[:, :, :1] if x is not None and x.shape[0] == N else x[:1] for x in inputs(jnp.bfloat16)
    )
    mask = jnp.asarray(np.random.default_rng(12).random((1, S, T)) < 0.5).at[:, 3].set(True)
    out = jax.jit(ops.FORMS[form])(q, k, v, mask)
    np.testing.assert_allclose(np.asarray(out, np.float64), naive(q, k, v, mask), atol=0.03)


@pytest.mark.parametrize("form", ops.FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_query_without_a_visible_slot_gives_no_nan_and_harms_no_other(form, dtype):
    q, k, v = inputs(dtype)
    attend = jax.jit(ops.FORMS[form])
    whole = np.asarray(attend(q, k, v, MASKED), np.float32)
    others = np.ones((B, T), bool)
    for queries in ([2], [0, 1, 2, 3]):  # one of a row's, and all
        hole = MASKED.at[1, :, jnp.asarray(queries)].set(False)
        holed = np.asarray(attend(q, k, v, hole), np.float32)
        assert np.isfinite(holed).all()
        others[1, queries] = False
        np.testing.assert_allclose(holed[:, others], whole[:, others], rtol=1e-6, atol=1e-6)


def test_cudnn_reads_the_cache_as_it_lies_up_to_each_rows_last_visible_slot(cudnn_calls):
    @jax.jit
    def operands(*given):
        ops.FORMS["cudnn"](*given)
        ((_, keys, values, named),) = cudnn_calls
        return keys, values, named["key_value_seq_lengths"]

    q, k, v = inputs(jnp.bfloat16)
    keys, values, lengths = operands(q, k, v, MASKED.at[0].set(False))
    for held, passed in ((k, keys), (v, values)):
        np.testing.assert_array_equal(passed.reshape(k.shape), held)
        assert passed.shape == (B * K, S, 1, H)
    assert lengths.dtype == jnp.int32
    assert lengths.tolist() == [1] * K + [13] * K  # a row that sees nothing has a slot all the same


@pytest.mark.parametrize(
    ("dtype", "width"), [(jnp.float32, 8), (jnp.bfloat16, 12), (jnp.bfloat16, 136)]
)
def test_cudnn_is_not_asked_for_what_it_does_not_take(dtype, width, cudnn_calls):
    q = jax.ShapeDtypeStruct((N, width, B, T), dtype)
    k = jax.ShapeDtypeStruct((B, K, S, width), dtype)
    out = jax.eval_shape(ops.FORMS["cudnn"], q, k, k, MASKED)
    assert not cudnn_calls
    assert (out.shape, out.dtype) == ((N * width, B, T), dtype)


def lowered(platform, dtype=jnp.bfloat16):
    """The text of `attention`'s program for a platform that need not be here."""
    check = export.DisabledSafetyCheck.custom_call("__cudnn$fmhaScaleBiasSoftmax")
    program = jax.jit(lambda *given: ops.attention(*given))  # not one that an earlier test traced
    out = export.export(program, platforms=[platform], disabled_checks=[check])(
        *inputs(dtype), MASKED
    )
    return out.mlir_module()


def test_the_platform_that_a_program_is_lowered_for_picks_its_form(monkeypatch):
    monkeypatch.undo()
    barrier = "optimization_barrier"  # the feature-major form's
    assert barrier in lowered("cpu")
    assert barrier not in lowered("cuda") + lowered("tpu")
    assert "fmha" not in lowered("cuda")


def test_a_form_named_in_the_environment_is_taken_on_every_platform(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(ops, "CHOSEN", ops.chosen({ops.VARIABLE: "xla"}))
    assert "optimization_barrier" not in lowered("cpu")
    monkeypatch.setattr(ops, "CHOSEN", ops.chosen({ops.VARIABLE: "cudnn"}))
    # JAX asks the driver for cuDNN's version while it traces.
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91002
    )
    text = lowered("cuda")
    assert text.count("stablehlo.custom_call @__cudnn$fmhaScaleBiasSoftmax(") == 1
    assert "PADDING" in text
    assert "dot_general" not in text
    for buffer in ("%arg1", "%arg2"):  # keys and values: no transposition, so no copy
        main = text.partition("func.func private")[0].splitlines()
        uses = [line for line in main if f"{buffer} " in line]
        assert len(uses) == 1
        assert "stablehlo.reshape" in uses[0]
    assert "fmha" not in lowered("cuda", jnp.float32)


def test_an_unknown_form_is_refused_at_import():
    assert ops.chosen({}) is ops.chosen({ops.VARIABLE: ""}) is None
    done = subprocess.run(
        [sys.executable, "-c", "import dflash_jax.ops.attention"],
        env=os.environ | {ops.VARIABLE: "flash"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode
    message = "DFLASH_JAX_ATTENTION='flash' must be one of feature_major, xla, cudnn"
    assert done.stderr.splitlines()[-1] == f"ValueError: {message}"


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
