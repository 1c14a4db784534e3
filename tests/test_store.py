import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

import train.store
from train.store import Example, read_ids, read_shard, shard_paths, write_shard

TAPS, WIDTH = (1, 4, 9), 5


def examples(count: int, dtype=np.float32, first: int = 0) -> list[Example]:
    rng = np.random.default_rng(first)
    return [
        Example.response(
            f"id{i}",
            ("chat", "math")[i % 2],
            rng.integers(100, size=4 + i, dtype=np.int32),
            1 + i % 3,
            rng.standard_normal((4 + i, len(TAPS) * WIDTH)).astype(dtype),
        )
        for i in range(first, first + count)
    ]


def assert_same(read: list[Example], written: list[Example], columns=slice(None)):
    assert len(read) == len(written)
    for a, b in zip(read, written):
        assert (a.id, a.kind) == (b.id, b.kind)
        np.testing.assert_array_equal(a.supervised, b.supervised)
        np.testing.assert_array_equal(a.tokens, b.tokens)
        assert np.asarray(a.features).dtype == b.features.dtype
        assert a.features.shape == a.features[:].shape
        np.testing.assert_array_equal(a.features, b.features[:, columns])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_shard_gives_back_what_was_written(tmp_path, dtype):
    written = examples(5, dtype)
    write_shard(tmp_path / "new" / "folder", 3, written, TAPS)
    (path,) = shard_paths(tmp_path / "new" / "folder")
    assert path.name == "00003.safetensors"
    assert_same(list(read_shard(path, TAPS)), written)


@pytest.mark.parametrize("taps", [(4,), (1, 9), (9, 1, 4), (9, 4)])
def test_taps_can_be_chosen_and_reordered(tmp_path, taps):
    written = examples(3)
    write_shard(tmp_path, 0, written, TAPS)
    columns = [TAPS.index(t) * WIDTH + i for t in taps for i in range(WIDTH)]
    assert_same(list(read_shard(tmp_path / "00000.safetensors", taps)), written, columns)


def test_a_missing_tap_is_an_error_that_names_both_sides(tmp_path):
    write_shard(tmp_path, 0, examples(1), TAPS)
    with pytest.raises(ValueError, match=r"holds taps \[1, 4, 9\], not \[2, 7\]"):
        list(read_shard(tmp_path / "00000.safetensors", (1, 7, 2)))


def test_features_of_another_number_of_taps_are_an_error(tmp_path):
    write_shard(tmp_path, 0, examples(1), (1, 4))
    with pytest.raises(ValueError, match="features of width 15 are no 2 taps"):
        list(read_shard(tmp_path / "00000.safetensors", (1, 4)))


def test_ids_of_all_shards_are_known_without_reading_their_tensors(tmp_path):
    assert read_ids(tmp_path / "absent") == set()
    write_shard(tmp_path, 0, examples(2), TAPS)
    write_shard(tmp_path, 1, examples(2, first=2), TAPS)
    assert read_ids(tmp_path) == {"id0", "id1", "id2", "id3"}


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_write_that_is_cut_short_leaves_no_shard_and_can_be_repeated(
    tmp_path, monkeypatch, moment
):
    write_shard(tmp_path, 0, examples(2), TAPS)
    real = train.store.save_file

    def cut(tensors, name, metadata):
        if moment != "before":
            real(tensors, name, metadata)
        if moment == "during":
            with open(name, "r+b") as f:
                f.truncate(100)
        raise KeyboardInterrupt

    monkeypatch.setattr(train.store, "save_file", cut)
    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path, 1, examples(2, first=2), TAPS)
    assert [p.name for p in shard_paths(tmp_path)] == ["00000.safetensors"]
    assert read_ids(tmp_path) == {"id0", "id1"}
    monkeypatch.undo()
    write_shard(tmp_path, 1, examples(2, first=2), TAPS)
    assert len(read_ids(tmp_path)) == 4
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["00000.safetensors", "00001.safetensors", "index.json"]  # fmt: skip


def test_the_format_on_disk_is_the_documented_one(tmp_path):
    written = examples(2, ml_dtypes.bfloat16)
    write_shard(tmp_path, 0, written, TAPS)
    with safe_open(str(tmp_path / "00000.safetensors"), "np") as f:
        assert set(f.keys()) == {"tokens", "features", "length", "supervised"}
        assert {k: json.loads(v) for k, v in f.metadata().items()} == {
            "ids": ["id0", "id1"],
            "kinds": ["chat", "math"],
            "target_layer_ids": list(TAPS),
        }
        assert f.get_tensor("features").shape == (9, len(TAPS) * WIDTH)
        assert f.get_tensor("length").tolist() == [4, 5]
