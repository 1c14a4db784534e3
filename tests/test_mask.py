import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.mask import block_mask, causal_mask


def matrix(*rows):
    """Slots downwards, queries to the right."""
    return np.array([[c == "x" for c in row] for row in rows])


@pytest.mark.parametrize(
    ("positions", "size", "window", "expected"),
    [
        ([0, 1, 2], 4, None, matrix("xxx", ".xx", "..x", "...")),
        ([2, 3], 5, None, matrix("xx", "xx", "xx", ".x", "..")),
        ([2, 3], 5, 2, matrix("..", "x.", "xx", ".x", "..")),
        ([2, 3], 5, 1, matrix("..", "..", "x.", ".x", "..")),
        ([2, 3], 5, 4, matrix("xx", "xx", "xx", ".x", "..")),
        ([4], 5, 3, matrix(".", ".", "x", "x", "x")),
    ],
)
def test_a_query_sees_itself_and_what_came_before(positions, size, window, expected):
    mask = causal_mask(jnp.asarray([positions], jnp.int32), size, window)
    np.testing.assert_array_equal(mask[0], expected)


def test_rows_are_masked_by_their_own_positions():
    mask = causal_mask(jnp.asarray([[0, 1], [3, 4]], jnp.int32), 5, 3)
    np.testing.assert_array_equal(mask[0], matrix("xx", ".x", "..", "..", ".."))
    np.testing.assert_array_equal(mask[1], matrix("..", "x.", "xx", "xx", ".x"))


def test_a_draft_block_sees_its_context_and_all_of_itself():
    mask = block_mask(jnp.asarray([0, 3], jnp.int32), 2, 6)
    np.testing.assert_array_equal(mask[0], matrix("xx", "xx", "..", "..", "..", ".."))
    np.testing.assert_array_equal(mask[1], matrix("xx", "xx", "xx", "xx", "xx", ".."))
