import dataclasses
import hashlib
import json
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import train.store
from train.store import (
    Example,
    Origin,
    load_examples,
    read_ids,
    read_shard,
    shard_paths,
    write_shard,
)

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
    write_shard(tmp_path, 0, written, TAPS, Origin("t", "v"))
    with safe_open(str(tmp_path / "00000.safetensors"), "np") as f:
        assert set(f.keys()) == {"tokens", "features", "length", "supervised"}
        assert f.metadata().keys() == {"examples"}
        assert json.loads(f.metadata()["examples"]) == {
            "ids": ["id0", "id1"],
            "kinds": ["chat", "math"],
            "target_layer_ids": list(TAPS),
        }
        assert f.get_tensor("supervised").dtype == bool
        assert f.get_tensor("features").shape == (9, len(TAPS) * WIDTH)
        assert f.get_tensor("length").tolist() == [4, 5]
    index = json.loads((tmp_path / "index.json").read_text())
    path = tmp_path / "00000.safetensors"
    assert index.pop("shards") == [
        {
            "file": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "examples": 2,
            "tokens": 9,
        }
    ]
    assert index == {
        "format": "dflash-jax features", "version": 1, "target": "t", "tokenizer": "v", "last_tap": "post_norm",
        "target_layer_ids": list(TAPS), "dtype": "bfloat16", "width": len(TAPS) * WIDTH,
    }  # fmt: skip


def test_the_older_layout_is_read(tmp_path):
    """A length for each prompt in the place of the mask, and an entry of metadata for each list."""
    written = examples(3)
    tensors = {
        "tokens": np.concatenate([e.tokens for e in written]),
        "features": np.concatenate([e.features for e in written]),
        "length": np.array([len(e.tokens) for e in written], np.int32),
        "prompt_length": np.array([e.prompt_length for e in written], np.int32),
    }
    lists = {"ids": [e.id for e in written], "kinds": [e.kind for e in written], "target_layer_ids": TAPS}  # fmt: skip
    path = tmp_path / "00000.safetensors"
    save_file(tensors, str(path), {k: json.dumps(v) for k, v in lists.items()})
    assert_same(read_shard(path, TAPS), written)
    with pytest.raises(ValueError, match="holds no responses or features"):
        load_examples(tmp_path, TAPS)  # which names no target


def test_the_responses_that_come_with_the_project_are_read():
    found = read_shard(Path(train.store.__file__).parent / "data/smollm2-responses.safetensors")
    assert len(found) == 5954
    assert {e.kind for e in found} == {"chat", "math", "code"}
    assert all(0 < e.prompt_length < len(e.tokens) and e.supervised[-1] for e in found)
    assert {e.features.shape[1] for e in found} == {0}


# What is refused.

ORIGIN = Origin("t", "v")


def test_features_of_another_origin_are_refused(tmp_path):
    write_shard(tmp_path, 0, examples(2), TAPS, ORIGIN)
    assert_same(load_examples(tmp_path, TAPS, ORIGIN), examples(2))
    for other, message in [
        (Origin("u", "v"), "target is t, not u"),
        (Origin("t", "w"), "tokenizer is v, not w"),
        (Origin("t", "v", "pre_norm"), "last_tap is post_norm, not pre_norm"),
    ]:
        with pytest.raises(ValueError, match=rf"index\.json: the features' {message}"):
            load_examples(tmp_path, TAPS, other)
        with pytest.raises(ValueError, match="holds shards with"):
            write_shard(tmp_path, 1, examples(2), TAPS, other)
    with pytest.raises(ValueError, match=r"target_layer_ids \[1, 4, 9\], not \[1, 4, 8\]"):
        write_shard(tmp_path, 1, examples(2), (1, 4, 8), ORIGIN)
    with pytest.raises(ValueError, match=r"00000\.safetensors holds taps \[1, 4, 9\], not \[2\]"):
        load_examples(tmp_path, (1, 2), ORIGIN)
    write_shard(tmp_path / "nobodys", 0, examples(2), TAPS)
    with pytest.raises(ValueError, match="target is None, not t"):
        load_examples(tmp_path / "nobodys", TAPS, ORIGIN)


def spoilt(value):
    good = examples(2)
    features = good[1].features.copy()
    features[2, WIDTH : 2 * WIDTH] = value
    return [good[0], dataclasses.replace(good[1], features=features)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "features of 'id1' at position 2 are not finite"),
        (-np.inf, "features of 'id1' at position 2 are not finite"),
        (0, "features of 'id1' are all zero at position 2, tap 4"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_features_that_no_target_has_are_refused_when_looked_at(tmp_path, value, message, dtype):
    bad = [dataclasses.replace(e, features=e.features.astype(dtype)) for e in spoilt(value)]
    write_shard(tmp_path, 0, bad, TAPS)
    found = load_examples(tmp_path, TAPS)
    with pytest.raises(ValueError, match=rf"00000\.safetensors: {message}"):
        np.asarray(found[0].features)


def test_a_shard_that_is_not_the_one_written_is_refused_when_looked_at(tmp_path):
    write_shard(tmp_path, 0, examples(2), TAPS)
    write_shard(tmp_path, 1, examples(2, first=2), TAPS)
    path = tmp_path / "00001.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found = load_examples(tmp_path, TAPS)
    np.testing.assert_array_equal(found[1].features, examples(2)[1].features)
    for _ in range(2):  # a shard that failed is not trusted the next time
        with pytest.raises(
            ValueError, match=r"00001\.safetensors has the sha256 \w{64}, not the index's"
        ):
            found[2].features[0]


@pytest.mark.parametrize("name", ["tokens", "supervised", "features", "length"])
def test_arrays_of_the_wrong_length_are_refused(tmp_path, name):
    write_shard(tmp_path, 0, examples(2), TAPS)
    path = tmp_path / "00000.safetensors"
    with safe_open(str(path), "np") as f:
        tensors, metadata = {k: f.get_tensor(k) for k in f.keys()}, f.metadata()  # noqa: SIM118
    tensors[name] = tensors[name][:-1].copy()
    save_file(tensors, str(path), metadata)
    with pytest.raises(
        ValueError, match=r"00000\.safetensors: arrays of different lengths: .*'tokens': \d"
    ):
        load_examples(tmp_path, TAPS)


def test_what_is_no_shard_or_index_is_named(tmp_path):
    (tmp_path / "00000.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"00000\.safetensors is no shard of examples"):
        read_shard(tmp_path / "00000.safetensors", TAPS)
    for text, message in [
        ("{", "is no index"),
        ("[]", "is no index"),
        ('{"format": "other", "version": 1}', r"is of \('other', 1\), not"),
        ('{"format": "dflash-jax features", "version": 2}', r"is of .*, 2\), not .*, 1\)"),
    ]:
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(ValueError, match=rf"index\.json {message}"):
            load_examples(tmp_path, TAPS)


def test_a_store_is_verified_once_and_not_held_in_memory(tmp_path, monkeypatch):
    """8 MB of features, of which a sequence's 80 kB are in memory at a time."""
    rows, width = 20, 1000
    for i in range(2):
        features = np.random.default_rng(i).standard_normal((rows, width)).astype(np.float32)
        many = [
            Example.response(f"{i} {n}", "chat", np.arange(rows, dtype=np.int32), 3, features)
            for n in range(50)
        ]
        write_shard(tmp_path, i, many, (1,))
    hashed, real = [], train.store.file_hash
    monkeypatch.setattr(
        train.store, "file_hash", lambda path: hashed.append(path.name) or real(path)
    )
    tracemalloc.start()
    found = load_examples(tmp_path, (1,))
    assert hashed == []
    for _ in range(2):
        for e in found:
            assert e.features[:].shape == (rows, width)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert hashed == ["00000.safetensors", "00001.safetensors"]
    assert peak < 1e6
