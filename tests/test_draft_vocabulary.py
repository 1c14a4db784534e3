"""The ids of a reduced vocabulary, and labels in it."""

import jax.numpy as jnp
import numpy as np
import pytest

from train.vocabulary import count_tokens, draft_labels, frequent_vocabulary, offsets, target_ids


def test_the_most_frequent_ids_come_in_order_and_ties_go_to_the_smaller():
    counts = np.array([0, 5, 2, 2, 9, 2, 0, 0])
    assert frequent_vocabulary(counts, 2).tolist() == [1, 4]
    assert frequent_vocabulary(counts, 4).tolist() == [1, 2, 3, 4]
    assert frequent_vocabulary(counts, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert frequent_vocabulary(counts, 4).dtype == np.int32


def test_stop_ids_are_always_among_them():
    counts = np.array([0, 5, 2, 2, 9, 2, 0, 0])
    assert frequent_vocabulary(counts, 3, (7, 4, 7)).tolist() == [1, 4, 7]
    assert frequent_vocabulary(counts, 1, (6,)).tolist() == [6]


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [
        (0, (), r"size=0 must be in \[1, 8\)"),
        (8, (), r"size=8 must be in \[1, 8\)"),
        (1, (3, 4), r"size=1 must be in \[2, 8\)"),
        (3, (8,), r"always=\[8\] must be ids in \[0, 8\)"),
    ],
)
def test_a_size_out_of_bounds_is_named(size, always, message):
    with pytest.raises(ValueError, match=message):
        frequent_vocabulary(np.ones(8, int), size, always)


def test_counts_are_of_every_response():
    counts = count_tokens([np.array([1, 1, 4]), np.array([], np.int32), np.array([4])], 6)
    assert counts.tolist() == [0, 2, 0, 0, 2, 0]


def test_labels_outside_are_told():
    ids = np.array([1, 4, 6], np.int32)
    d2t = jnp.asarray(offsets(ids))
    assert d2t.tolist() == [1, 3, 4]
    assert target_ids(d2t).tolist() == ids.tolist()
    labels, inside = draft_labels(jnp.array([[4, 0, 6], [7, 1, 5]]), d2t)
    assert inside.tolist() == [[True, False, True], [False, True, False]]
    assert labels[inside].tolist() == [1, 2, 0]
    assert labels.dtype == jnp.int32
    assert int(labels.max()) < 3
