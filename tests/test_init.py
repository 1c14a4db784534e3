"""Runs that start from a published draft of any dialect, on the target that it was made for."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import leaves_equal, prompts_of
from training import answers

from dflash_jax.checkpoint.keys import flatten
from dflash_jax.config import Domino
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.pair import load_draft, load_target
from dflash_jax.sharding import make_mesh
from train.config import TrainConfig, read_recipe
from train.data import frequent_ids
from train.draft import draft_config, export, first_state
from train.inputs import make_step_input
from train.optimizer import make_optimizer
from train.run import one_step
from train.setup import Setup, prepare
from train.step import block_hidden, whole
from train.vocabulary import target_ids
from train.warm_start import fold_scale

OTHERS = (
    "dflash_headdim", "dflash_full", "dflash_all_causal", "dflash_mixed", "dflash_old_layout", "dflash_sliding_bidirectional",
    "dflash_sliding_causal", "dflash_yarn", "speculators_full", "speculators_sliding_noncausal",
)  # fmt: skip
FLAT, NESTED = "dflash_headdim", "speculators_sliding_causal"
RECIPE = """
run = "{run}"
init = "{init}"
batch_size = 2
anchors = 6
sequence_size = 48
frequent = 8
candidates = 256
chunk = 64
steps = 8
warmup = 0
"""


def set_up(golden: Path, run: Path, name: str, *overrides: str) -> Setup:
    folder = golden / "drafts" / name
    file = run / "recipe.toml"
    file.write_text(RECIPE.format(run=run, init=folder))
    config = read_recipe(file, overrides)
    target = load_target(golden / json.loads((folder / "case.json").read_text())["target"])
    module = DFlashDraftModel(draft_config(target, config))
    prompts = prompts_of(5, 9, vocab=200)
    examples = answers(target, prompts, 12, config.target_layer_ids)
    return Setup(config, target, module, make_optimizer(config), examples, {}, frequent_ids(examples, 8))  # fmt: skip


def begin(setup: Setup):
    return first_state(setup.config, setup.target, setup.module.config, setup.optimizer, setup.examples)  # fmt: skip


@pytest.mark.parametrize("name", [NESTED, *(pytest.param(n, marks=pytest.mark.deep) for n in OTHERS)])  # fmt: skip
def test_a_run_starts_from_a_published_draft_as_it_is(golden, tmp_path, name):
    setup = set_up(golden, tmp_path, name)
    given = load_draft(golden / "drafts" / name, setup.target, dtype="float32")
    assert setup.module.config == given.config
    config = setup.config
    assert (config.block_size, config.mask_token_id) == (given.config.block_size, 253)
    assert config.target_layer_ids == given.config.target_layer_ids
    state = begin(setup)
    first = fold_scale(state.params, state.feature_scale)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), first, given.params)  # fmt: skip


@pytest.mark.parametrize("name", [NESTED, pytest.param("dflash_mixed", marks=pytest.mark.deep)])
def test_a_published_draft_is_trained_on_and_exported(golden, tmp_path, name):
    setup = set_up(golden, tmp_path, name)
    draft, state, losses = setup.module.config, begin(setup), []
    for step in range(8):
        state, values = one_step(setup, state, step)
        losses.append(values["loss"])
    assert losses[-1] < losses[0]
    export(draft, state, tmp_path / "draft")
    written = load_draft(tmp_path / "draft", setup.target, dtype=jnp.bfloat16)
    assert written.config == draft
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), fold_scale(state.params, state.feature_scale))  # fmt: skip
    assert leaves_equal(written.params, rounded)


def test_a_recipe_adds_layers_a_head_and_a_vocabulary_which_start_quiet(golden, tmp_path):
    added = ("num_hidden_layers=3", 'head={kind="domino", emb_dim=6, gru_hidden_dim=10}', "draft_vocab_size=64")  # fmt: skip
    setup = set_up(golden, tmp_path, "dflash_full", *added)
    given = load_draft(golden / "drafts/dflash_full", setup.target, dtype="float32")
    draft = setup.module.config
    assert (draft.num_hidden_layers, draft.draft_vocab_size, draft.own_head) == (3, 64, True)
    assert isinstance(draft.head, Domino)
    state = begin(setup)
    params = fold_scale(state.params, state.feature_scale)
    for path, leaf in flatten(given.params).items():
        np.testing.assert_allclose(flatten(params)[path], leaf, rtol=1e-5, atol=1e-7)
    assert state.d2t is not None
    rows = setup.head[target_ids(state.d2t)]
    np.testing.assert_array_equal(params["lm_head"]["weight"], rows)
    last = setup.target.params["layers_3"]["mlp"]["down_proj"]["weight"]
    np.testing.assert_allclose(params["layers_2"]["mlp"]["down_proj"]["weight"], 0.02 * last)
    blocks, _ = make_step_input(setup, 0)
    before = block_hidden(DFlashDraftModel(given.config), fold_scale(given.params, 1 / state.feature_scale), setup.embedding, state.feature_scale, blocks)  # fmt: skip
    params = whole(state.params, state.d2t)
    after = block_hidden(setup.module, params, setup.embedding, state.feature_scale, blocks)
    assert np.linalg.norm(after - before) < 0.1 * np.linalg.norm(before)
    _, values = one_step(setup, state, 0)
    assert np.isfinite(values["loss"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("block_size=8", "has block_size=6, but the recipe says block_size=8"),
        ("num_hidden_layers=1", "has num_hidden_layers=2, but the recipe says num_hidden_layers=1"),
        ("mask_token_id=9", "has mask_token_id=253, but the recipe says mask_token_id=9"),
        ("target_layer_ids=[0, 1]", r"\(0, 1, 3\), but the recipe says target_layer_ids=\(0, 1\)"),
        ('init="absent/folder"', "init='absent/folder': "),
    ],
)
def test_a_recipe_that_contradicts_its_draft_is_one_error(
    golden, tmp_path, monkeypatch, override, message
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE.format(run=tmp_path, init=golden / "drafts" / FLAT))
    with pytest.raises(ValueError, match=message) as error:
        read_recipe(file, [override])
    assert "\n" not in str(error.value)
    assert read_recipe(file, ["block_size=6"]).block_size == 6


def test_a_config_that_contradicts_its_draft_is_an_error_without_a_recipe_too(golden, tmp_path):
    target = load_target(golden / "targets/qwen3_tied")
    config = TrainConfig(run=str(tmp_path), init=str(golden / "drafts" / FLAT))
    with pytest.raises(
        ValueError, match=r"has block_size=6, mask_token_id=253, .* says block_size=8"
    ):
        draft_config(target, config)


def test_a_checkpoint_without_taps_takes_the_recipes(golden, tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE.format(run=tmp_path, init=golden / "drafts/dflash_default_ids"))
    with pytest.raises(ValueError, match="lacks target_layer_ids"):
        read_recipe(file)
    assert read_recipe(file, ["target_layer_ids=[0, 2]"]).target_layer_ids == (0, 2)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("mask_token_id=256", "256"),
        ("mask_token_id=1", "mask_token_id"),
        ("target_layer_ids=[0, 9]", "9"),
    ],
)
def test_a_draft_that_is_none_for_the_target_is_refused_before_any_tensor_is_read(
    golden, tmp_path, monkeypatch, key, message
):
    """Id 1 is the target's stop id; a draft with that mask would not load behind its training."""
    monkeypatch.setattr("train.setup.load_target", lambda *_, **__: pytest.fail("was loaded"))
    file = tmp_path / "recipe.toml"
    file.write_text(f'run = "{tmp_path}"\ntarget = "{golden / "targets/qwen3_tied"}"\n')
    config = read_recipe(file, ["target_layer_ids=[0, 1]", "mask_token_id=253", key])
    with pytest.raises(ValueError, match=message):
        prepare(config, make_mesh(devices=jax.devices()[:1]))
