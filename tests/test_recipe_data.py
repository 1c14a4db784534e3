"""From a recipe to a step's input: files, packing, stored and online features, processes."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import random_params
from training import TAPS, tiny_target

import train.setup
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.sharding import make_mesh
from train.config import TrainConfig, read_recipe
from train.data import frequent_ids
from train.draft import draft_config
from train.inputs import make_step_input
from train.optimizer import make_optimizer
from train.setup import Setup
from train.step import block_loss
from train.store import Example

TARGET = tiny_target()
LAST = TARGET.config.num_hidden_layers - 1
SIZE = 64
MESH = make_mesh(devices=jax.devices()[:1])
MIXTURE = {"cross_entropy": 0.5, "kl_divergence": 0.5}


def recipe(**options) -> TrainConfig:
    defaults = dict(
        run="r", target_layer_ids=TAPS, num_hidden_layers=1, block_size=4, mask_token_id=63, batch_size=2, anchors=SIZE,
        sequence_size=SIZE, response_size=SIZE, max_new_tokens=32, frequent=8, candidates=700, chunk=64, rows=2, refill=2, steps=3, warmup=1,
    )  # fmt: skip
    return TrainConfig(**(defaults | options))


def example(name: str, length: int, prompt: int, seed: int) -> Example:
    """Any text, with any features."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((length, (len(TAPS) + 1) * TARGET.config.hidden_size))
    tokens = rng.integers(60, size=length, dtype=np.int32)
    return Example.response(name, "chat", tokens, prompt, features.astype(jnp.bfloat16))


EXAMPLES = [example(f"e{i}", 8 + 3 * i, 2 + i, i) for i in range(6)]


def set_up(config: TrainConfig, examples=EXAMPLES) -> Setup:
    if not config.objective.needs_teacher:
        width = len(TAPS) * TARGET.config.hidden_size
        examples = [dataclasses.replace(e, features=e.features[:, :width]) for e in examples]
    module = DFlashDraftModel(draft_config(TARGET, config))
    frequent = frequent_ids(examples, config.frequent)
    return Setup(config, TARGET, module, make_optimizer(config), examples, {}, frequent)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _loss(module, objective, params, embedding, head, scale, blocks):
    return block_loss(module, objective, 64, params, embedding, head, scale, blocks)


def loss_of(setup: Setup, step: int = 0):
    """The loss of a step's input on a random draft, and the number of its labels."""
    blocks, ids = make_step_input(setup, step)
    params = random_params(setup.module.config, 1)
    scale = jnp.ones(blocks.features.shape[2])
    head = setup.head[jnp.asarray(ids)]
    loss, _ = _loss(setup.module, setup.config.objective, params, setup.embedding, head, scale, blocks)  # fmt: skip
    return float(loss), int(blocks.counts.sum())


# Packing.


def test_a_packed_recipe_has_the_loss_of_the_same_documents_unpacked():
    options = dict(mixture=MIXTURE)
    two = EXAMPLES[1:3]
    packed = set_up(recipe(packed=True, batch_size=1, **options), two)
    alone = set_up(recipe(batch_size=2, **options), two)
    assert packed.rows == [[1, 0]]
    blocks, _ = make_step_input(packed, 0)
    assert blocks.documents.max() == 1
    (loss, labels), (expected, count) = loss_of(packed), loss_of(alone)
    assert labels == count > 20
    assert loss == pytest.approx(expected, rel=1e-5)


def test_packed_rows_are_fewer_and_hold_every_example():
    packed = set_up(recipe(packed=True, batch_size=1))
    assert sorted(i for row in packed.rows for i in row) == list(range(6))
    assert len(packed.rows) == 2
    seen = {
        row.tobytes() for step in range(2) for row in make_step_input(packed, step)[0].documents
    }
    assert len(seen) == 2


# Anchors.


@pytest.mark.parametrize(("packed", "drawn"), [(False, 8), (True, 4)])
def test_anchors_are_counted_against_the_legal_ones(packed, drawn):
    """Packed documents share a row's anchors, so that short ones starve if they stay as few."""
    config, two = recipe(packed=packed, anchors=4, batch_size=1), EXAMPLES[1:3]
    legal = sum(len(e.tokens) - e.prompt_length - 1 for e in two)
    counts = {"rows": 2 - packed, "legal_anchors": legal, "anchors_an_epoch": drawn}
    assert train.setup.count_anchors(config, two) == counts
    setup = set_up(config, two)
    real = [make_step_input(setup, step)[0].real for step in range(len(setup.rows))]
    assert sum(int(r.sum()) for r in real) == drawn


def anchors_of(blocks) -> list[list[int]]:
    return [sorted(a[r].tolist()) for a, r in zip(np.asarray(blocks.anchors), np.asarray(blocks.real))]  # fmt: skip


def test_a_rows_anchors_are_of_the_example_wherever_it_lies():
    """The same six examples in another order, and packed: only their rows change."""
    options = dict(batch_size=6, anchors=4, prefix_base=0.5, candidates=700)
    forward, backward = set_up(recipe(**options)), set_up(recipe(**options), EXAMPLES[::-1])
    found = []
    for setup in (forward, backward):
        blocks, _ = make_step_input(setup, 0)
        rows = zip(np.asarray(blocks.tokens[:, :, 0]), np.asarray(blocks.first), anchors_of(blocks))
        found.append(sorted((t.tolist(), f.tolist(), a) for t, f, a in rows))
    assert found[0] == found[1]
    assert len({tuple(a) for _, _, a in found[0]}) > 1
    other, _ = make_step_input(forward, 1)
    assert sorted(a for _, _, a in found[0]) != sorted(anchors_of(other)), "a step draws anew"
    renamed = [dataclasses.replace(e, id=e.id + "!") for e in EXAMPLES]
    other, _ = make_step_input(set_up(recipe(**options), renamed), 0)
    assert sorted(a for _, _, a in found[0]) != sorted(anchors_of(other)), "so does an example"


def test_an_examples_noise_does_not_depend_on_its_neighbours_in_the_row():
    """With room for half the legal anchors, packed alone behind padding or behind another."""
    one, two = EXAMPLES[4], EXAMPLES[3]
    alone = set_up(recipe(packed=True, batch_size=1, anchors=5), [one])
    (expected,) = anchors_of(make_step_input(alone, 0)[0])
    both = set_up(recipe(packed=True, batch_size=1, anchors=SIZE), [one, two])
    assert both.rows == [[0, 1]]
    mute = dataclasses.replace(two, supervised=np.zeros(len(two.tokens), bool))
    muted = set_up(recipe(packed=True, batch_size=1, anchors=5), [mute, one])
    muted.__dict__["rows"] = [[0, 1]]
    (found,) = anchors_of(make_step_input(muted, 0)[0])
    assert [a - len(two.tokens) for a in found] == expected


# Rows that teach nothing.


def test_rows_that_teach_nothing_have_no_anchors():
    """All masked, one supervised token, shorter than a block with one anchor, and a single token."""
    long = EXAMPLES[0]
    rows = [
        dataclasses.replace(long, id="masked", supervised=np.zeros(len(long.tokens), bool)),
        example("one", 5, 4, 20),
        example("short", 3, 1, 21),
        example("token", 1, 0, 22),
    ]
    blocks, _ = make_step_input(set_up(recipe(batch_size=4, anchors=6), rows), 0)
    assert sorted(map(len, anchors_of(blocks))) == [0, 0, 0, 1]
    assert blocks.counts.sum() == 1


# Recipes of files.


class Tokenizer:
    """One token a letter."""

    def get_vocab(self):
        return {"a": 0}

    def __call__(self, text):
        return {"input_ids": [1 + ord(c) % 40 for c in text]}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two files of texts, one of them too long; nothing is held out."""
    monkeypatch.setattr(train.setup, "load_target", lambda ref, sharding: TARGET)
    monkeypatch.setattr(train.setup, "open_target", lambda path: (TARGET, None))
    monkeypatch.setattr(train.setup, "load_tokenizer", lambda target: Tokenizer())
    monkeypatch.setattr(train.setup.prompt_set, "EVALUATION_FILES", ())
    texts = tmp_path / "texts.txt"
    texts.write_text("Once upon a time\nthere was\n" + "long " * 30 + "\nx\n")
    more = tmp_path / "more.jsonl"
    more.write_text(
        "\n".join(json.dumps({"text": t}) for t in ("a hill by the sea", "and a house"))
    )
    return (str(texts), str(more))


def test_a_recipe_of_files_trains_on_stored_and_online_features_alike(files, tmp_path, capsys):
    options = dict(data=files, mixture=MIXTURE)
    setups = {
        f: train.setup.prepare(recipe(run=str(tmp_path / f), features=f, **options), MESH)
        for f in ("stored", "online")
    }
    counts = {
        "kept": 4, "cut": 0, "dropped": 1, "unsupervised": 1, "tokens": 53, "supervised": 53, "rows": 4,
        "legal_anchors": 49, "anchors_an_epoch": 49,
    }  # fmt: skip
    for name in setups:
        assert json.loads((tmp_path / name / "data.json").read_text()) == counts
    assert (
        "training on 4 kept, 0 cut, 1 dropped, 1 unsupervised, 53 tokens" in capsys.readouterr().err
    )
    assert not (tmp_path / "online/features").exists()
    (stored, ids), (online, other) = (make_step_input(s, 1) for s in setups.values())
    assert np.array_equal(ids, other)
    for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(online), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-7, atol=2**-7)
    losses = [loss_of(s)[0] for s in setups.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    again = recipe(run=str(tmp_path / "again"), features=str(tmp_path / "stored/features"))
    found = train.setup.prepare(again, MESH)
    assert [e.id for e in found.examples] == [e.id for e in setups["stored"].examples]


def test_files_that_are_too_few_for_a_step_end_the_run_before_anything_is_made(files, tmp_path):
    config = recipe(run=str(tmp_path / "r"), data=files, batch_size=5, anchors=6)
    with pytest.raises(ValueError, match=r"gives 4 rows of up to config.sequence_size=64 tokens, fewer than config.batch_size=5"):  # fmt: skip
        train.setup.prepare(config, MESH)
    assert not (tmp_path / "r").exists()


def test_long_documents_of_a_recipe_may_be_cut(files, tmp_path):
    config = recipe(
        run=str(tmp_path / "r"), data=files, too_long="cut", features="online", packed=True
    )
    setup = train.setup.prepare(config, MESH)
    counts = json.loads((tmp_path / "r/data.json").read_text())
    assert (counts["kept"], counts["cut"], counts["dropped"], counts["rows"]) == (5, 1, 0, 2)
    assert max(len(e.tokens) for e in setup.examples) == SIZE


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('data = "a.jsonl"', "data='a.jsonl' must be a list of files"),
        ("data = [3]", r"data=\(3,\) must be a list of files"),
        ('too_long = "keep"', "too_long='keep' must be drop or cut"),
        ('thinking = "on"', "thinking='on' must be keep or strip"),
        ("turns = 1", "turns=1 must be all or last"),
        ("packed = 1", "packed=1 must be true or false"),
        ('data = ["a"]\nfeatures = "store"', "both name what to train on"),
    ],
)
def test_a_bad_recipe_of_files_is_one_error_that_names_the_key(tmp_path, line, message):
    path = tmp_path / "recipe.toml"
    path.write_text(f'run = "r"\n{line}\n')
    with pytest.raises(ValueError, match=message):
        read_recipe(path)
