"""The target's taps of given texts: against a plain forward, in a store, and as a step needs them."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import prompts_of
from training import TAPS, taps_of, tiny_target

import train.features
from dflash_jax.config import RopeConfig
from dflash_jax.pair import Target
from train.features import (
    as_needed,
    main,
    online_features,
    target_hash,
    tokenizer_hash,
    with_features,
    write_features,
)
from train.store import Example, Origin, load_examples

TARGET = tiny_target()
SIZE = 64
ORIGIN = Origin("t", "v")


def examples(*lengths: int) -> list[Example]:
    texts = (np.array(t, np.int32) for t in prompts_of(*lengths))
    return [Example.bare(f"e{i}", "chat", t, np.arange(len(t)) > 1) for i, t in enumerate(texts)]


TEXTS = examples(9, 30, 1, 17, 22)


@pytest.fixture(scope="module")
def known():
    return list(with_features(TARGET, TEXTS, TAPS, rows=2))


def test_features_are_those_of_a_plain_forward_in_bfloat16(known):
    for text, found in zip(TEXTS, known, strict=True):
        assert found.id == text.id
        assert found.features.dtype == jnp.bfloat16
        expected = taps_of(TARGET, text.tokens)[:-1]
        found = found.features.astype(np.float32)
        np.testing.assert_allclose(found[:-1], expected, rtol=2**-7, atol=1e-4)
        assert not found[-1].any()


def test_online_features_are_the_same_wherever_an_example_lies(known):
    rows = [[3, 0, 2], [1, 4]]
    found = np.asarray(
        online_features(TARGET, [[TEXTS[i] for i in row] for row in rows], TAPS, SIZE)
    )
    for row, values in zip(rows, found):
        expected = np.concatenate([known[i].features for i in row])
        np.testing.assert_array_equal(values[: len(expected)], expected)
        assert not values[len(expected) :].any()
    (longer,) = np.asarray(online_features(TARGET, [[TEXTS[1]]] * 2, TAPS, 20))[:1]
    np.testing.assert_array_equal(longer[:19], known[1].features[:19])


def test_features_as_needed_are_computed_when_looked_at(known, monkeypatch):
    needed = as_needed(TARGET, TEXTS, TAPS)
    assert [e.features.shape for e in needed] == [e.features.shape for e in known]
    asked = []

    def computed(target, examples, taps, *, rows):
        assert (target, taps, rows) == (TARGET, TAPS, len(examples))
        asked.extend(e.id for e in examples)
        return [known[3]]

    monkeypatch.setattr(train.features, "with_features", computed)
    np.testing.assert_array_equal(needed[3].features[2:], known[3].features[2:])
    assert asked == ["e3"]


@pytest.mark.parametrize(("texts", "message"), [([[]], "text 0 has 0 tokens"), ([[1], [2] * 65], "text 1 has 65 tokens, not 1 to size=64")])  # fmt: skip
def test_texts_that_do_not_fit_are_named(texts, message):
    with pytest.raises(ValueError, match=message):
        train.features.taps_of(TARGET, texts, TAPS, SIZE)
    with pytest.raises(ValueError, match=r"taps \[3\] are not in \[0, 3\)"):
        train.features.taps_of(TARGET, [[1]], (0, 3), SIZE)


# Stores.


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def written(folder: Path, texts=TEXTS, origin=ORIGIN, taps=TAPS):
    write_features(TARGET, origin, texts, folder, taps, rows=2)


@pytest.mark.parametrize("moment", ["before", "between"])
def test_an_interrupted_run_ends_with_the_same_files(tmp_path, known, monkeypatch, moment):
    monkeypatch.setattr(train.features, "EXAMPLES_A_SHARD", 2)
    written(tmp_path / "straight")
    real, count = train.features.write_shard, []

    def cut(folder, index, *args):
        if index == 1:
            if moment == "between":  # the shard is there, and not yet in the index
                before = (folder / "index.json").read_bytes()
                real(folder, index, *args)
                (folder / "index.json").write_bytes(before)
            raise KeyboardInterrupt
        count.append(index)
        real(folder, index, *args)

    monkeypatch.setattr(train.features, "write_shard", cut)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "cut")
    assert [e.id for e in load_examples(tmp_path / "cut", TAPS, ORIGIN)] == ["e0", "e1"]
    monkeypatch.setattr(train.features, "write_shard", real)
    written(tmp_path / "cut")
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "straight")
    for found, expected in zip(load_examples(tmp_path / "cut", TAPS, ORIGIN), known, strict=True):
        np.testing.assert_array_equal(found.features, expected.features)
    monkeypatch.setattr(train.features, "write_shard", None)
    written(tmp_path / "cut")  # nothing is left to do


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"texts": TEXTS[1:]}, "features of other examples"),
        ({"texts": [dataclasses.replace(TEXTS[0], supervised=TEXTS[0].tokens < 0), *TEXTS[1:]]}, "features of other examples"),
        ({"origin": Origin("u", "v")}, "target is t, not u"),
        ({"taps": (0, 1)}, r"taps \[0, 2\], not \[1\]"),
    ],
)  # fmt: skip
def test_a_folder_of_something_else_is_not_added_to(tmp_path, changed, message):
    written(tmp_path)
    with pytest.raises(ValueError, match=message):
        written(tmp_path, **changed)


def test_a_targets_hash_is_of_its_weights_and_rope_in_whatever_dtype():
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), TARGET.params)
    config = dataclasses.replace(TARGET.config, rope=RopeConfig(theta=2e4))
    hashes = [
        target_hash(t)
        for t in (
            TARGET,
            Target(TARGET.config, rounded, (), Path("elsewhere")),
            tiny_target(1),
            Target(config, TARGET.params, (), Path()),
        )
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


class Tokenizer:
    """One token a letter."""

    def __init__(self, letters="ab"):
        self.letters = letters

    def get_vocab(self):
        return {letter: i for i, letter in enumerate(self.letters)}

    def __call__(self, text):
        return {"input_ids": [1 + ord(c) % 40 for c in text]}


def test_a_tokenizers_hash_is_of_its_vocabulary():
    assert tokenizer_hash(Tokenizer("ab")) == tokenizer_hash(Tokenizer("ab"))
    assert tokenizer_hash(Tokenizer("ab")) != tokenizer_hash(Tokenizer("ba"))


def test_the_command_writes_a_store_and_ends_with_one_line_for_a_mistake(tmp_path, monkeypatch, capsys):  # fmt: skip
    monkeypatch.setattr(train.features, "load_target", lambda ref: TARGET)
    monkeypatch.setattr(train.features, "load_tokenizer", lambda target: Tokenizer())
    data, out = tmp_path / "a.txt", tmp_path / "out"
    data.write_text("hello there\nx\nhow are you\n")
    command = [str(data), str(out), "--taps", "0,2", "--rows", "2", "--max-length", "60"]
    assert main(command) == 0
    index = json.loads((out / "index.json").read_text())
    assert index["target"] == target_hash(TARGET)
    assert index["tokenizer"] == tokenizer_hash(Tokenizer())
    assert (index["dtype"], index["width"], index["target_layer_ids"]) == ("bfloat16", 64, [0, 2])
    found = load_examples(out, (2,), Origin(index["target"], index["tokenizer"]))
    assert [e.id for e in found] == ["a.txt, line 1", "a.txt, line 3"]
    capsys.readouterr()
    assert main([str(data), str(out), "--taps", "0,7"]) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[-1] == "error: taps [7] are not in [0, 3)"
    assert main([str(data), str(out), "--taps", "0,x"]) == 1
    assert (
        capsys.readouterr().err == "error: --taps '0,x' must be layers with commas, like 1,9,17\n"
    )
