import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.norm import rms_norm

EPS = 1e-6


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_norm_follows_the_float64_formula(axis, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((6, 4, 2)) * 30, dtype)
    scale = jnp.asarray(rng.standard_normal(x.shape[axis]), dtype)
    y = rms_norm(x, scale, EPS, axis)
    assert y.dtype == dtype
    x64, s64 = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    shape = [1, 1, 1]
    shape[axis] = -1
    expected = x64 / np.sqrt((x64**2).mean(axis, keepdims=True) + EPS) * s64.reshape(shape)
    rtol = 1e-6 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=rtol, atol=1e-6)


def test_huge_bfloat16_features_do_not_overflow():
    x = jnp.full((8, 1, 1), 1e30, jnp.bfloat16)
    y = rms_norm(x / 1e12, jnp.ones(8, jnp.bfloat16), EPS)
    np.testing.assert_allclose(np.asarray(y, np.float32), 1.0)


def test_zeros_stay_zeros():
    np.testing.assert_array_equal(rms_norm(jnp.zeros((4, 1, 1)), jnp.ones(4), EPS), 0.0)
