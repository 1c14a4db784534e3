"""Recipes of every kind of draft, from the first state to a checkpoint that decodes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import PROMPTS, TARGET, begin, recipe, set_up
from training import STOP

import train.run
from dflash_jax.generation import generate
from dflash_jax.pair import load_draft
from train.config import HEAD_KINDS
from train.draft import export
from train.evaluate import evaluate
from train.inputs import make_step_input
from train.restore import read_draft
from train.run import one_step
from train.vocabulary import target_ids

HEADS = {
    "domino": {"kind": "domino", "emb_dim": 6, "gru_hidden_dim": 10, "shift_label": True},
    "dflash2": {"kind": "dflash2", "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5},
    "dspark": {"kind": "dspark", "markov_rank": 4},
}  # fmt: skip
KL = {"mixture": {"cross_entropy": 0.5, "kl_divergence": 0.5}}
RECIPES = {
    "domino": {"head": HEADS["domino"], "accumulate": 2},
    "reduced": {"draft_vocab_size": 24, "window_rule": "speculators", **KL},
    "dflash2": {"head": HEADS["dflash2"], "remat": True, "selector_missing": "replace"},
    "dspark": {"head": HEADS["dspark"], "sample_from_anchor": True, "own_embedding": True, "own_head": True},
    "sliding": {"layer_types": ("sliding_attention",), "sliding_window": 5, "is_causal": True, "dtype": "bfloat16"},
    "reduced dspark": {
        "draft_vocab_size": 24, "head": HEADS["dspark"], "sample_from_anchor": True, "accumulate": 2,
        "layer_types": ("sliding_attention",), "sliding_window": 3,  # shorter than a block: no dialect has all this
    },
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("name", RECIPES)
def test_a_trained_draft_loads_decodes_and_can_be_gone_on_with(name, store, tmp_path):
    setup = set_up(store, tmp_path / "run", candidates=60, **RECIPES[name])
    start, state = begin(setup), begin(setup)
    for step in range(2):
        with jax.set_mesh(setup.mesh):
            state, values = one_step(setup, state, step)
        assert np.isfinite(values["loss"])
        assert values["labels"] > 0
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), start.params, state.params)
    assert all(jax.tree.leaves(moved))
    length = evaluate(
        setup.module, state.params, setup.embedding, setup.head, state.feature_scale, setup.held_out["held_out"],
        anchors=4, batch_size=2, size=32, chunk=20, d2t=state.d2t,
    )  # fmt: skip
    assert 1 <= length <= 5
    folder = tmp_path / "draft"
    export(setup.module.config, state, folder)
    draft = load_draft(folder, TARGET, dtype=jnp.float32)
    assert draft.config == setup.module.config
    plain, drafted = (generate(TARGET, d, PROMPTS[:2], max_new_tokens=9) for d in (None, draft))
    assert drafted.tokens == plain.tokens
    again = set_up(store, tmp_path / "again", init=str(folder))
    assert again.module.config == draft.config
    resumed = begin(again)
    np.testing.assert_allclose(
        resumed.params["norm"]["weight"], state.params["norm"]["weight"], rtol=1e-2
    )
    assert (resumed.d2t is None) == (state.d2t is None)


def test_a_reduced_vocabularys_head_starts_as_the_targets_rows(store, tmp_path):
    setup = set_up(store, tmp_path, draft_vocab_size=24)
    state = begin(setup)
    ids = np.asarray(target_ids(state.d2t))
    assert STOP in ids
    assert len(set(ids.tolist())) == 24
    np.testing.assert_array_equal(state.params["lm_head"]["weight"], np.asarray(setup.head)[ids])
    assert "d2t" not in state.params
    blocks, rows = make_step_input(setup, 0)
    assert rows is None
    assert blocks.labels.max() > 24  # the target's ids: the step has the draft's


@pytest.mark.deep
def test_a_checkpoints_reduced_vocabulary_is_read_with_it(store, tmp_path):
    setup = set_up(store, tmp_path, draft_vocab_size=24, steps=3, decode_every=0, evaluate_every=3)
    train.run.train(setup)
    draft = read_draft(tmp_path)
    np.testing.assert_array_equal(draft.params["d2t"], begin(setup).d2t)
    exported = load_draft(tmp_path / "draft", TARGET)
    np.testing.assert_array_equal(exported.params["d2t"], draft.params["d2t"])


def test_every_head_is_a_recipes(tmp_path):
    assert HEADS.keys() == HEAD_KINDS.keys()
    for kind, head in HEADS.items():
        assert type(recipe(tmp_path, head=head).draft_head) is HEAD_KINDS[kind]
    assert recipe(tmp_path).draft_head is None
    assert recipe(tmp_path, base_ratio=0.5).objective.base_steps == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"head": {"kind": "medusa"}},
            r"head=\{'kind': 'medusa'\} must have a kind of \['dflash2'",
        ),
        ({"head": {"kind": "dspark", "rank": 3}}, "head=.*'rank'"),
        ({"head": {"kind": "dspark", "markov_rank": 0}}, "markov_rank=0 must be at least 1"),
        ({"head": 3}, "head=3 must be a table"),
        ({"layer_types": "all"}, "layer_types='all' must be a list"),
        ({"window_rule": "eagle"}, "window_rule='eagle' must be zlab or nemo"),
        ({"is_causal": 1}, "is_causal=1 must be true or false"),
        ({"remat": "yes"}, "remat='yes' must be true or false"),
        ({"accumulate": 3}, "batch_size=2 must be a multiple of self.accumulate=3"),
        ({"prefix_base": 0.9, "sample_from_anchor": True}, "prefix_base=0.9 needs a draft without"),
        ({"selector_missing": "drop"}, "selector_missing='drop' must be of"),
        ({"sliding_window": -1}, "sliding_window=-1 must be an integer, at least 0"),
    ],
)
def test_a_bad_key_is_named(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        recipe(tmp_path, **options)


def test_a_recipe_that_describes_another_draft_than_it_starts_from_is_named(store, tmp_path):
    setup = set_up(store, tmp_path / "run")
    export(setup.module.config, begin(setup), tmp_path / "draft")
    for options, said in (
        ({"block_size": 3}, "has block_size=4, but the recipe says block_size=3"),
        (
            {"head": HEADS["dspark"]},
            "predicts from slot 1 on, but head=DSpark(markov_rank=4, markov_head_type='vanilla') from slot 0 on",
        ),
        (
            {"sample_from_anchor": True},
            "has sample_from_anchor=False, but the recipe says sample_from_anchor=True",
        ),
    ):
        with pytest.raises(ValueError, match=r"init=.*" + re.escape(said)):
            set_up(store, tmp_path / "other", init=str(tmp_path / "draft"), **options)
