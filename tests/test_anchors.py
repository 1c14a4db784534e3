import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.anchors import block_labels, sample_anchors, sample_first_slots

BLOCK = 4


def mask(*rows: str):
    """A mask from strings in which 1 is a supervised token."""
    return jnp.array([[c == "1" for c in row] for row in rows])


def drawn(key, supervised, count):
    positions, real = sample_anchors(key, supervised, count)
    return [p[r].tolist() for p, r in zip(np.asarray(positions), np.asarray(real))]


def test_every_supervised_token_with_a_supervised_successor_is_legal_and_no_other():
    supervised = mask("0011111", "0110011", "1111000", "0101010", "0000001")
    assert drawn(jax.random.key(0), supervised, 7) == [[2, 3, 4, 5], [1, 5], [0, 1, 2], [], []]


def test_anchors_are_distinct_ascending_and_as_many_as_asked_for():
    supervised = jnp.ones((3, 40), bool)
    for seed in range(20):
        for row in drawn(jax.random.key(seed), supervised, 11):
            assert len(row) == 11
            assert row == sorted(set(row))
            assert row[-1] <= 38


def test_every_legal_anchor_is_drawn_equally_often():
    supervised = mask("00111110")
    rows = [drawn(jax.random.key(seed), supervised, 2)[0] for seed in range(400)]
    counts = np.bincount(np.concatenate(rows), minlength=8)
    assert set(np.flatnonzero(counts)) == {2, 3, 4, 5}
    assert np.all(np.abs(counts[2:6] - 200) < 50)


@pytest.mark.parametrize("count", [3, 7, 8, 20])
def test_asking_for_more_anchors_than_are_legal_pads_with_unreal_ones(count):
    positions, real = sample_anchors(jax.random.key(0), mask("00001110", "00000000"), count)
    assert positions.shape == real.shape == (2, count)
    assert real.sum(axis=1).tolist() == [2, 0]
    assert positions[0, :2].tolist() == [4, 5]
    assert not positions[0, 2:].any()
    assert not positions[1].any()


def test_a_row_with_exactly_one_legal_anchor_always_gives_it():
    for seed in range(5):
        assert drawn(jax.random.key(seed), mask("000110"), 1) == [[3]]


def test_the_same_key_draws_the_same_anchors_and_another_step_others():
    supervised = jnp.ones((2, 100), bool)
    key = jax.random.key(7)
    at_step = [drawn(jax.random.fold_in(key, step), supervised, 8) for step in (0, 1, 0)]
    assert at_step[0] == at_step[2]
    assert at_step[0] != at_step[1]
    assert at_step[0][0] != at_step[0][1], "rows draw the same anchors"


def test_rows_draw_the_same_number_whatever_their_neighbours_hold():
    alone = drawn(jax.random.key(1), mask("0011111111"), 3)
    assert len(alone[0]) == len(drawn(jax.random.key(1), mask("0011111111", "0000000000"), 3)[0])


def test_labels_are_the_tokens_after_the_anchor_and_slot_0_never_counts():
    tokens = jnp.arange(100, 110)[None]
    labels, counts = block_labels(
        tokens, jnp.ones((1, 10), bool), jnp.array([[2, 5]]), jnp.array([[True, True]]), BLOCK
    )
    assert labels.tolist() == [[[102, 103, 104, 105], [105, 106, 107, 108]]]
    assert counts.tolist() == [[[False, True, True, True]] * 2]


def test_labels_past_the_response_past_the_row_or_of_unreal_anchors_do_not_count():
    tokens = jnp.arange(8)[None]
    anchors, real = jnp.array([[1, 4, 6, 0]]), jnp.array([[True, True, True, False]])
    _, counts = block_labels(tokens, mask("01111101"), anchors, real, BLOCK)
    assert counts.astype(int).tolist() == [[[0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]]


def test_a_block_as_long_as_the_row_keeps_its_labels():
    tokens = jnp.arange(BLOCK)[None]
    positions, real = sample_anchors(jax.random.key(0), jnp.ones((1, BLOCK), bool), 9)
    labels, counts = block_labels(tokens, jnp.ones((1, BLOCK), bool), positions, real, BLOCK)
    assert positions[0, :3].tolist() == [0, 1, 2]
    assert counts[0].sum(axis=1).tolist() == [3, 2, 1, 0, 0, 0, 0, 0, 0]
    assert labels[0, 0].tolist() == [0, 1, 2, 3]


def test_a_row_shorter_than_a_block_keeps_the_labels_it_has():
    row = jnp.ones((1, 3), bool)
    positions, real = sample_anchors(jax.random.key(0), row, 2)
    _, counts = block_labels(jnp.arange(3)[None], row, positions, real, BLOCK)
    assert positions.tolist() == [[0, 1]]
    assert counts.astype(int).tolist() == [[[0, 1, 1, 0], [0, 1, 0, 0]]]


def test_first_slots_leave_a_label_and_fall_off_with_the_base():
    first = np.asarray(sample_first_slots(jax.random.key(0), (40, 50), 6, 0.5))
    share = np.bincount(first.reshape(-1), minlength=6) / first.size
    np.testing.assert_allclose(share, [0, 0, 8 / 15, 4 / 15, 2 / 15, 1 / 15], atol=0.03)
    assert sample_first_slots(jax.random.key(0), (2, 3), 2, 0.9).tolist() == [[1] * 3] * 2


def test_a_slot_that_predicts_from_the_anchor_has_the_next_token_for_label():
    tokens, documents = jnp.arange(8)[None], jnp.array([[0, 0, 0, 0, 0, 1, 1, 1]])
    supervised, anchors = jnp.ones((1, 8), bool).at[0, 4].set(False), jnp.array([[1, 6]])
    args = tokens, supervised, anchors, jnp.ones((1, 2), bool), 3
    labels, counts = block_labels(*args, documents, first_slot=0)
    assert labels.tolist() == [[[2, 3, 4], [7, 7, 7]]]
    assert counts.astype(int).tolist() == [[[1, 1, 0], [1, 0, 0]]]
    one_later, _ = block_labels(*args, documents)
    assert one_later.tolist() == [[[1, 2, 3], [6, 7, 7]]]
