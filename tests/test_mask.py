import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax.ops.mask import block_masks, causal_mask, draft_mask


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


def held(size, rows=1):
    return jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (rows, size))


def test_a_draft_block_sees_its_context_and_all_of_itself():
    mask = draft_mask(jnp.asarray([0, 3], jnp.int32), held(6, 2), 2)
    np.testing.assert_array_equal(mask[0], matrix("xx", "xx", "..", "..", "..", ".."))
    np.testing.assert_array_equal(mask[1], matrix("xx", "xx", "xx", "xx", "xx", ".."))


CAUSAL = ("xxxx", ".xxx", "..xx", "...x")
ALL = ("xxxx",) * 4
# Context positions 6..11 and then the block itself, of a block of 4 whose anchor stands at 12, under a window of 5.
# Downwards what is seen, to the right who sees it.
MOVING = ("....", "....", "x...", "xx..", "xxx.", "xxxx")
FIXED = ("....", "xxxx", "xxxx", "xxxx", "xxxx", "xxxx")
TABLE = [
    ("zlab", 5, True, MOVING + CAUSAL),
    ("zlab", 5, False, MOVING + ALL),
    ("nemo", 5, True, MOVING + CAUSAL),
    ("nemo", 5, False, MOVING + ALL),
    ("specforge", 5, True, MOVING + CAUSAL),
    ("specforge", 5, False, MOVING + ALL),
    ("speculators", 5, True, FIXED + CAUSAL),
    ("speculators", 5, False, FIXED + ALL),
    # A window shorter than the block cuts z-lab's block, on both sides, and nobody else's.
    ("zlab", 2, True, ("....",) * 5 + ("x...", "xx..", ".xx.", "..xx", "...x")),
    ("zlab", 2, False, ("....",) * 5 + ("x...", "xx..", "xxx.", ".xxx", "..xx")),
    ("nemo", 2, False, ("....",) * 5 + ("x...", *ALL)),
    ("specforge", 2, True, ("....",) * 5 + ("x...", *CAUSAL)),
    ("speculators", 2, True, ("....",) * 4 + ("xxxx", "xxxx", *CAUSAL)),
    ("speculators", 2, False, ("....",) * 4 + ("xxxx", "xxxx", *ALL)),
    # Full layers know no rule.
    ("zlab", None, True, (*ALL, "xxxx", "xxxx", *CAUSAL)),
    ("speculators", None, False, (*ALL, "xxxx", "xxxx", *ALL)),
]


@pytest.mark.parametrize(("rule", "window", "causal", "expected"), TABLE)
def test_each_trainers_window_rule_in_decoding(rule, window, causal, expected):
    mask = draft_mask(jnp.asarray([12], jnp.int32), held(20), 4, window, causal, rule)[0]
    np.testing.assert_array_equal(mask[6:16], matrix(*expected))
    assert not mask[16:].any()
    assert (np.asarray(mask[:6]) == (window is None)).all()


@pytest.mark.parametrize(("rule", "window", "causal", "expected"), TABLE)
def test_each_trainers_window_rule_in_training(rule, window, causal, expected):
    anchors = jnp.asarray([[12, 3]], jnp.int32)
    far, near = block_masks(anchors, 14, 4, window, causal, rule)
    far = np.broadcast_to(far, (1, 14, 2, 4))
    np.testing.assert_array_equal(far[0, 6:12, 0], matrix(*expected[:6]))
    np.testing.assert_array_equal(near, matrix(*expected[6:]))
    assert not far[0, 12:, 0].any()
    # The other block sees the same, nine positions earlier.
    np.testing.assert_array_equal(far[0, :3, 1], matrix(*expected[3:6]))
    assert not far[0, 3:, 1].any()


def dense(anchors, size, *layout):
    """`block_masks` of one row as the trainers lay them out: `[A * Q, S + A * Q]`, queries first."""
    far, near = block_masks(jnp.asarray(anchors[None], jnp.int32), size, 6, *layout)
    far = np.broadcast_to(far[0], (size, len(anchors), 6)).transpose(1, 2, 0).reshape(-1, size)
    return np.concatenate(
        [far, np.kron(np.eye(len(anchors), dtype=bool), np.asarray(near).T)], axis=1
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("full", (None, False, "nemo")),
        ("causal", (None, True, "nemo")),
        ("sliding", (6, False, "nemo")),
        ("sliding_small", (3, False, "nemo")),
    ],
)
def test_nemos_own_masks(golden, name, layout):
    arrays = load_file(golden / "training/nemo_masks/expected.safetensors")
    for anchors, keep, expected in zip(arrays["anchors"], arrays["keep"], arrays[f"mask_{name}"]):
        real = np.repeat(keep, 6)
        np.testing.assert_array_equal(dense(anchors, 26, *layout)[real], expected[real])


@pytest.mark.parametrize(
    ("name", "layout"),
    [("full", (None, False, "specforge")), ("sliding", (6, True, "specforge"))],
)
def test_specforges_own_masks(golden, name, layout):
    arrays = load_file(golden / "training/specforge_dflash/expected.safetensors")
    for anchors, keep, expected in zip(arrays["anchors"], arrays["keep"], arrays[f"mask_{name}"]):
        real = np.repeat(keep, 6)
        np.testing.assert_array_equal(dense(anchors, 47, *layout)[real], expected[real])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("full", (None, False, "speculators")),
        ("sliding_causal", (6, True, "speculators")),
        ("sliding_noncausal", (6, False, "speculators")),
        ("sliding3_causal", (3, True, "speculators")),
    ],
)
def test_speculators_own_masks(golden, name, layout):
    arrays = load_file(golden / "training/speculators_masks/expected.safetensors")
    expected = arrays[f"mask_single_{name}"]
    np.testing.assert_array_equal(dense(arrays["anchors"], 30, *layout), expected)


def test_a_ring_is_masked_by_the_positions_that_its_slots_hold():
    """Six slots with the block at 7 and 8: slot 0 holds 6, and slot 3 still 3."""
    positions = jnp.asarray([[6, 7, 8, 3, 4, 5]], jnp.int32)
    mask = draft_mask(jnp.asarray([7], jnp.int32), positions, 2, 3, True, "zlab")
    np.testing.assert_array_equal(mask[0], matrix("xx", "xx", ".x", "..", "..", "x."))
