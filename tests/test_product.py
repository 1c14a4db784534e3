"""The one matrix product: its values and gradients, and the columns that it multiplies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.product import product


def operands(rows: int, columns: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    weight, x = jax.random.normal(keys[0], (5, 3)), jax.random.normal(keys[1], (3, rows, columns))
    return weight.astype(dtype), x.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 7, 8, 9, 16, 17])
def test_a_product_and_its_gradients_are_einsums(columns, rows, dtype):
    weight, x = operands(rows, columns, dtype)
    given = np.linspace(-1, 1, 5 * rows * columns, dtype=np.float32).reshape(5, rows, columns)

    y, back = jax.vjp(product, weight, x)
    by_weight, by_x = back(jnp.asarray(given))

    assert (y.dtype, by_weight.dtype, by_x.dtype) == (jnp.float32, dtype, dtype)
    w, v, g = (np.asarray(a, np.float32) for a in (weight, x, jnp.asarray(given, dtype)))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-2, "atol": 1e-2}
    np.testing.assert_allclose(y, np.einsum("FD,DBT->FBT", w, v), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        by_weight.astype(jnp.float32), np.einsum("FBT,DBT->FD", g, v), **tolerance
    )
    np.testing.assert_allclose(
        by_x.astype(jnp.float32), np.einsum("FD,FBT->DBT", w, g), **tolerance
    )


@pytest.mark.parametrize(
    ("dtype", "rows", "columns", "multiplied"),
    [
        ("float32", 1, 1, 1),
        ("float32", 1, 3, 3),
        ("float32", 2, 3, 4),
        ("float32", 1, 5, 8),
        ("float32", 4, 7, 8),
        ("float32", 1, 9, 16),
        ("float32", 1, 17, 17),
        ("bfloat16", 1, 1, 2),
        ("bfloat16", 2, 1, 1),
        ("bfloat16", 1, 7, 7),
    ],
)
def test_the_cpu_multiplies_as_many_columns_as_are_fast(dtype, rows, columns, multiplied):
    lowered = jax.jit(product).lower(*operands(rows, columns, dtype)).as_text()
    assert re.findall(r"dot_general.*-> tensor<(.*)xf32>", lowered) == [f"5x{rows}x{multiplied}"]
