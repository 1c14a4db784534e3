import importlib
import sys

import numpy as np
import pytest

from train.data import (
    batch_indices,
    candidate_ids,
    frequent_ids,
    make_batch,
    number,
    stack_features,
)
from train.store import Example, load_examples, write_shard


def example(length: int, prompt_length: int = 2, start: int = 0, width: int = 6) -> Example:
    tokens = np.arange(start, start + length, dtype=np.int32)
    features = np.arange(1, length * width + 1, dtype=np.float32).reshape(length, width)
    return Example.response(f"e{start}", "chat", tokens, prompt_length, features)


@pytest.mark.parametrize(("count", "batch_size"), [(12, 4), (13, 4), (5, 5), (9, 1)])
def test_an_epoch_takes_no_example_twice_and_leaves_out_less_than_a_batch(count, batch_size):
    per_epoch = count // batch_size
    epochs = [
        np.concatenate(
            [batch_indices(e * per_epoch + i, count, batch_size, 0) for i in range(per_epoch)]
        )
        for e in range(3)
    ]
    for order in epochs:
        assert len(order) == len(set(order)) == per_epoch * batch_size
        assert set(order) <= set(range(count))
    assert [e.tolist() for e in epochs[1:]] != [epochs[0].tolist()] * 2


def test_over_the_epochs_every_example_has_its_turn():
    assert {i for step in range(40) for i in batch_indices(step, 13, 4, 0)} == set(range(13))


def test_batch_indices_depend_on_step_and_seed_alone():
    a, b = (batch_indices(17, 30, 4, 5).tolist() for _ in range(2))
    assert a == b
    assert a != batch_indices(18, 30, 4, 5).tolist()
    assert a != batch_indices(17, 30, 4, 6).tolist()


def test_fewer_examples_than_a_batch_are_an_error_with_both_numbers():
    with pytest.raises(ValueError, match="3 rows of examples are fewer than batch_size=4"):
        batch_indices(0, 3, 4, 0)


def test_candidates_are_distinct_sorted_as_many_as_asked_and_hold_all_fixed_ids():
    labels, frequent = np.array([7, 900, 7, 3]), np.array([3, 500, 10])
    for seed in range(10):
        ids = candidate_ids(labels, frequent, 1000, 20, np.random.default_rng(seed))
        assert ids.dtype == np.int32
        assert len(ids) == 20
        assert np.all(np.diff(ids) > 0)
        assert {3, 7, 10, 500, 900} <= set(ids.tolist())
        assert 0 <= ids[0] < ids[-1] < 1000


def test_the_other_candidates_come_from_the_whole_vocabulary_alike():
    labels, frequent = np.arange(0, 40), np.arange(20, 60)
    counts = np.zeros(1000, int)
    for seed in range(300):
        counts[candidate_ids(labels, frequent, 1000, 100, np.random.default_rng(seed))] += 1
    others = counts[60:].reshape(4, -1).sum(axis=1)
    assert np.all(np.abs(others - 3000) < 300), others


def test_candidates_are_the_same_for_the_same_generator():
    args = np.array([1]), np.array([2]), 500, 50
    a, b, c = (candidate_ids(*args, np.random.default_rng(s)).tolist() for s in (0, 0, 1))
    assert a == b != c


def test_a_vocabulary_below_the_number_of_candidates_takes_part_whole():
    ids = candidate_ids(np.array([1, 4]), np.array([2]), 30, 50, np.random.default_rng(0))
    assert ids.tolist() == list(range(30))


def test_candidates_without_room_for_the_labels_are_an_error():
    with pytest.raises(ValueError, match="5 labels and frequent ids are more than the 4 head rows"):
        candidate_ids(np.arange(4), np.array([9]), 100, 4, np.random.default_rng(0))


def test_frequent_ids_count_responses_only_and_break_ties_by_id():
    examples = [
        Example.response("a", "chat", np.array([9, 9, 9, 5, 5, 2], np.int32), 3, np.zeros((6, 1))),
        Example.response("b", "chat", np.array([9, 4, 2, 7], np.int32), 1, np.zeros((4, 1))),
    ]
    assert frequent_ids(examples, 3).tolist() == [2, 5, 4]
    assert frequent_ids(examples, 10).tolist() == [2, 5, 4, 7]


def test_a_batch_pads_short_examples_and_cuts_long_ones():
    short, long = example(3), example(9, prompt_length=4, start=50)
    batch = make_batch([[short], [long]], 6)
    assert batch.tokens.tolist() == [[0, 1, 2, 0, 0, 0], [50, 51, 52, 53, 54, 55]]
    assert batch.supervised.astype(int).tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]]
    assert batch.documents.tolist() == [[0, 0, 0, -1, -1, -1], [0] * 6]
    features = stack_features([[short], [long]], 6)
    np.testing.assert_array_equal(features[0, :3], short.features)
    assert not features[0, 3:].any()
    np.testing.assert_array_equal(features[1], long.features[:6])


def test_rows_hold_their_examples_end_to_end():
    a, b, c = example(3, 1), example(2, 1, 50), example(1, 0, 90)
    batch = make_batch([[a, b], [c]], 6)
    assert batch.tokens.tolist() == [[0, 1, 2, 50, 51, 0], [90, 0, 0, 0, 0, 0]]
    assert batch.supervised.astype(int).tolist() == [[0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, -1], [0, -1, -1, -1, -1, -1]]
    assert batch.documents.dtype == batch.tokens.dtype == np.int32
    first, second, third = (number(e) for e in (a, b, c))
    assert batch.numbers.tolist() == [[first] * 3 + [second] * 2 + [0], [third] + [0] * 5]
    assert len({first, second, third}) == 3
    with pytest.raises(ValueError, match="row 0 holds 5 tokens, more than size=4"):
        make_batch([[a, b]], 4)


def test_load_examples_reads_all_shards_in_order_and_names_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match="holds no responses"):
        load_examples(tmp_path, (1,))
    write_shard(tmp_path, 1, [example(4, start=20)], (1, 3))
    write_shard(tmp_path, 0, [example(3), example(5, start=10)], (1, 3))
    assert [e.id for e in load_examples(tmp_path, (1, 3))] == ["e0", "e10", "e20"]


def test_what_to_install_is_said_where_training_is_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    monkeypatch.delitem(sys.modules, "train.data")
    with pytest.raises(ModuleNotFoundError, match=r"training needs grain: .*\[train\]"):
        importlib.import_module("train.data")
