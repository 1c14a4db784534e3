"""Drafts with tables of their own, and which position a slot predicts."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import (
    DRAFT,
    TARGET,
    assemble,
    assemble_draft,
    prompts_of,
    random_draft,
    random_params,
    random_target,
)
from safetensors.numpy import load_file, save_file

from dflash_jax import generate, load_draft, load_target
from dflash_jax.adapters import DraftModel, TargetModel, bind
from dflash_jax.cache import KVCache
from dflash_jax.checkpoint import export, orbax
from dflash_jax.config import DFlash2, DraftConfig
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.models.transformer import Transformer
from dflash_jax.pair import read_draft, read_draft_config

ANCHORED = dataclasses.replace(DRAFT, block_size=4, sample_from_anchor=True)


@pytest.fixture
def reduced(golden):
    """Config and tensors of a draft with a reduced vocabulary."""
    folder = golden / "drafts/speculators_reduced_vocab"
    config = DraftConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return config, load_file(folder / "model.safetensors")


def test_d2t_is_an_offset_and_t2d_is_checked_then_dropped(reduced):
    config, tensors = reduced
    params = assemble_draft(tensors.items(), config, "here", jnp.bfloat16)
    assert "t2d" not in params
    assert params["d2t"].dtype == jnp.int32
    assert params["lm_head"]["weight"].dtype == jnp.bfloat16
    ids = np.asarray(params["d2t"]) + np.arange(96)
    np.testing.assert_array_equal(ids, np.flatnonzero(tensors["t2d"]))
    del tensors["t2d"]
    assemble_draft(tensors.items(), config, "here")


def test_tables_that_disagree_are_an_error(reduced):
    config, tensors = reduced
    other = {**tensors, "t2d": ~tensors["t2d"]}
    with pytest.raises(ValueError, match="here: t2d and d2t name different ids"):
        assemble_draft(other.items(), config, "here")
    for entry, value in ((95, 200), (0, -1), (3, -50)):
        wrong = tensors["d2t"].copy()
        wrong[entry] = value
        with pytest.raises(ValueError, match=r"i \+ d2t\[i\] must be ascending ids in \[0, 256\)"):
            assemble_draft({**tensors, "d2t": wrong}.items(), config, "here")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("d2t"), r"missing d2t \[96\]"),
        (lambda t: t.pop("lm_head.weight"), r"missing lm_head\.weight \[96, 48\]"),
        (lambda t: t.update(d2t=t["d2t"].astype(np.float32)), "d2t .* float32, not integers"),
        (lambda t: t.update({"d2t_": t.pop("d2t")}), r"unknown d2t_ \[96\].*missing d2t"),
        (lambda t: t.update({"lm_head.weight": np.ones((256, 48), np.float32)}), r"misshapen lm_head\.weight"),
        (lambda t: t.update({"lm_head.weight": np.zeros((96, 48), np.float32)}), r"lm_head\.weight .* all zeros"),
    ],
)  # fmt: skip
def test_a_faulty_vocabulary_tensor_is_an_error_naming_it(reduced, change, named):
    config, tensors = reduced
    change(tensors)
    with pytest.raises(ValueError, match=named):
        assemble_draft(tensors.items(), config, "here")


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_codebooks_go_with_and_without_a_suffix_but_not_both(suffix):
    name = "candidate_selector.predecessor_codebook"
    value = np.ones((4, 2), np.float32)
    expected = {"candidate_selector/predecessor_codebook": (4, 2)}
    params = assemble([(name + suffix, value)], expected, "here")
    assert params["candidate_selector"]["predecessor_codebook"].shape == (4, 2)
    with pytest.raises(ValueError, match="duplicated"):
        assemble([(name, value), (name + ".weight", value)], expected, "here")


def test_a_draft_with_a_reduced_vocabulary_survives_orbax_but_not_the_flat_dialect(
    golden, tmp_path
):
    target = load_target(golden / "targets/qwen3_tied", dtype=jnp.float32)
    draft = load_draft(golden / "drafts/speculators_reduced_vocab", target, dtype=jnp.float32)
    assert draft.config.num_target_layers == target.config.num_hidden_layers
    orbax.save(tmp_path / "ours", "draft", draft.config, draft.params)
    again = load_draft(tmp_path / "ours", target, dtype=jnp.bfloat16)
    assert again.config == draft.config
    np.testing.assert_array_equal(again.params["d2t"], draft.params["d2t"])
    assert again.params["d2t"].dtype == jnp.int32
    with pytest.raises(ValueError, match="draft_vocab_size=96, own_head=True cannot be said"):
        export.save_draft(tmp_path / "flat", draft.config, draft.params)


def test_a_layout_and_a_head_survive_orbax(tmp_path):
    conv = DFlash2(conv_kernel_size=2, conv_group_size=16, selector_rank=4, selector_top_k=2)
    config = dataclasses.replace(
        DRAFT, layer_types=("sliding_attention", "full_attention"), sliding_window=5, is_causal=None,
        window_rule="specforge", final_logit_softcapping=30.0, sample_from_anchor=True, head=conv,
    )  # fmt: skip
    orbax.save(tmp_path / "ours", "draft", config, random_params(config, 1))
    assert orbax.read_header(tmp_path / "ours").config == config


def test_a_head_and_a_table_in_the_checkpoint_are_the_drafts_own(golden, tmp_path):
    """Whatever their sizes: they are those of the target here."""
    shutil.copytree(golden / "drafts/speculators_full", tmp_path / "draft")
    rng = np.random.default_rng(0)
    own = {n: rng.standard_normal((256, 48)).astype(np.float32) for n in ("embed_tokens.weight", "lm_head.weight")}  # fmt: skip
    tensors = load_file(tmp_path / "draft/model.safetensors")
    save_file({**tensors, **own}, tmp_path / "draft/model.safetensors")
    target = load_target(golden / "targets/qwen3_gqa", dtype=jnp.float32)
    draft = load_draft(tmp_path / "draft", target, dtype=jnp.float32)
    assert (draft.config.own_head, draft.config.own_embedding) == (True, True)
    fns = DraftModel(DFlashDraftModel(draft.config), TargetModel(Transformer(target.config)))
    params = {"target": target.params, "draft": draft.params}
    x = fns.embed(params, jnp.asarray([[5, 253]], jnp.int32))
    np.testing.assert_array_equal(x[:, 0].T, own["embed_tokens.weight"][[5, 253]])
    logits = fns.logits(params, x)[:, 0].T
    expected = own["embed_tokens.weight"][[5, 253]] @ own["lm_head.weight"].T
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_the_shared_head_stays_the_targets(golden):
    path = golden / "drafts/speculators_full"
    draft = read_draft(path, read_draft_config(path))
    assert (draft.config.own_head, draft.config.own_embedding) == (False, False)
    assert "lm_head" not in draft.params


# Which position a slot predicts


@pytest.mark.parametrize("anchored", [False, True])
def test_the_first_proposal_comes_from_the_anchors_slot_or_the_one_behind(anchored):
    config = dataclasses.replace(ANCHORED, sample_from_anchor=anchored)
    fns = DraftModel(DFlashDraftModel(config), TargetModel(Transformer(TARGET)))
    params = {"target": random_params(TARGET, 0), "draft": random_params(config, 1)}
    cache = KVCache.zeros(2, 1, 1, 16, config.head_dim, jnp.float32)
    anchor = jnp.asarray([7], jnp.int32)
    width = config.max_proposals + 1
    assert width == (5 if anchored else 4)
    logits, _ = jax.jit(functools.partial(fns.block_logits, block_size=width))(
        params, anchor, cache
    )
    block = jnp.asarray([[7, 33, 33, 33]], jnp.int32)
    module = {"params": params["draft"]}
    hidden, _ = jax.jit(fns.module.apply)(module, fns.embed(params, block), cache)
    expected = fns.logits(params, hidden)[:, :, 0 if anchored else 1 :]
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_block_that_samples_from_its_anchor_is_verified_with_one_more_token():
    target, draft = random_target(), random_draft(ANCHORED)
    assert bind(target, draft)[0].block_size == 5
    assert bind(target, draft, 5)[0].block_size == 5
    with pytest.raises(ValueError, match=r"block_size=6 must be in \[1, 5\]"):
        bind(target, draft, 6)
    plain = random_draft(dataclasses.replace(ANCHORED, sample_from_anchor=False))
    assert bind(target, plain)[0].block_size == 4


@pytest.mark.parametrize("block_size", [2, pytest.param(5, marks=pytest.mark.deep)])
def test_anchored_drafts_are_lossless_up_to_the_last_position(block_size):
    """The target ends at 64 positions and the draft at 16: text stops there, and is the target's own."""
    short = dataclasses.replace(TARGET, max_position_embeddings=64)
    target = random_target(short)
    draft = random_draft(dataclasses.replace(ANCHORED, max_position_embeddings=16))
    prompts = prompts_of(40)
    plain = generate(target, None, prompts, max_new_tokens=100, stop_token_ids=())
    out = generate(
        target, draft, prompts, max_new_tokens=100, stop_token_ids=(), block_size=block_size
    )
    assert out.tokens == plain.tokens
    assert len(out.tokens[0]) == 24
    assert out.finish == ["length"]
