import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import KVCache, read_rows, write_rows


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("axis", [1, 2])
def test_each_row_is_written_at_its_own_start(rows, axis):
    rng = np.random.default_rng(0)
    buffer = rng.standard_normal((rows, 7, 8))
    shape = list(buffer.shape)
    shape[axis] = 2
    new = rng.standard_normal(shape).astype(np.float32)
    start = np.array([3, 0, 5], np.int32)[:rows]
    out = jax.jit(write_rows, static_argnames="axis")(
        jnp.asarray(buffer, jnp.float32), jnp.asarray(new), jnp.asarray(start), axis=axis
    )
    expected = buffer.astype(np.float32)
    for b, s in enumerate(start):
        if axis == 1:
            expected[b, s : s + 2] = new[b]
        else:
            expected[b, :, s : s + 2] = new[b]
    np.testing.assert_array_equal(out, expected)


def test_rows_are_cast_to_the_buffer_and_not_the_buffer_to_the_rows():
    buffer = jnp.zeros((2, 4), jnp.bfloat16)
    out = write_rows(buffer, jnp.ones((2, 1), jnp.float32), jnp.asarray([0, 1]), axis=1)
    assert out.dtype == jnp.bfloat16


def test_rows_are_read_from_their_own_start():
    buffer = jnp.arange(12).reshape(2, 6)
    assert read_rows(buffer, jnp.asarray([1, 3]), 2).tolist() == [[1, 2], [9, 10]]


def test_an_empty_cache_has_its_shape_and_no_live_slot():
    cache = KVCache.zeros(layers=3, batch=2, heads=4, size=16, width=8, dtype=jnp.bfloat16)
    assert cache.size == 16
    assert [x.shape for x in (*cache.k, *cache.v)] == [(2, 4, 16, 8)] * 6
    assert {x.dtype for x in (*cache.k, *cache.v)} == {jnp.dtype(jnp.bfloat16)}
    assert cache.length.tolist() == [0, 0]
    assert cache.length.dtype == jnp.int32


def test_a_grown_cache_keeps_its_slots_and_its_length():
    cache = KVCache.zeros(1, 2, 1, 4, 2, jnp.float32)
    filled = cache.replace(
        k=(jnp.ones((2, 1, 4, 2)),), v=(2 * jnp.ones((2, 1, 4, 2)),), length=jnp.asarray([1, 4])
    )
    grown = filled.resize(6)
    assert grown.size == 6
    assert grown.length.tolist() == [1, 4]
    for old, new in ((filled.k[0], grown.k[0]), (filled.v[0], grown.v[0])):
        np.testing.assert_array_equal(new[:, :, :4], old)
        np.testing.assert_array_equal(new[:, :, 4:], 0.0)


def test_a_rewind_copies_nothing():
    cache = KVCache.zeros(2, 1, 1, 4, 2, jnp.float32).replace(length=jnp.asarray([3]))
    rewound = cache.replace(length=jnp.asarray([1]))
    assert all(a is b for a, b in zip((*rewound.k, *rewound.v), (*cache.k, *cache.v)))
