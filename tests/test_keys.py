import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fakes import assemble
from safetensors.numpy import load_file

from dflash_jax.checkpoint import keys, values
from dflash_jax.config import DraftConfig, TargetConfig

UP = "model.layers.1.mlp.up_proj.weight"


def read(folder):
    """(expected shapes, tensors) of a golden checkpoint."""
    raw = json.loads((folder / "config.json").read_text())
    config = DraftConfig.from_hf(raw) if "dflash_config" in raw else TargetConfig.from_hf(raw)
    return keys.expected_shapes(config), load_file(folder / "model.safetensors")


@pytest.fixture
def target(golden):
    return read(golden / "targets/qwen3_gqa")


@pytest.fixture
def tied(golden):
    return read(golden / "targets/qwen3_tied")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("model.layers.10.self_attn.q_proj.weight", "layers_10/self_attn/q_proj/weight"),
        ("model.embed_tokens.weight", "embed_tokens/weight"),
        ("lm_head.weight", "lm_head/weight"),
        ("model.norm.weight", "norm/weight"),
    ],
)
def test_names_map_both_ways(name, path):
    assert keys.path_of(name) == path
    assert keys.name_of(path, "model.") == name


def test_draft_names_have_no_prefix_but_one_is_tolerated():
    name = "layers.0.mlp.up_proj.weight"
    assert keys.path_of(name) == keys.path_of(f"model.{name}") == "layers_0/mlp/up_proj/weight"
    assert keys.name_of(keys.path_of(name)) == name


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (
            "candidate_selector.successor_codebook",
            "candidate_selector/successor_codebook",
        ),
        (
            "candidate_selector.hidden_projection.weight",
            "candidate_selector/hidden_projection/weight",
        ),
        ("prefix_gru.weight_ih_l0", "prefix_gru/weight_ih_l0"),
        ("embed_proj.2.weight", "embed_proj/2/weight"),
        ("markov_head.markov_w1.weight", "markov_head/markov_w1/weight"),
    ],
)
def test_heads_names_map_both_ways_and_from_their_other_spellings(name, path):
    assert keys.path_of(name) == keys.path_of(f"logit_head.{name}") == path
    assert keys.name_of(path) == name
    if "codebook" in name:
        assert keys.path_of(f"{name}.weight") == path


@pytest.mark.parametrize("folder", ["targets/qwen3_gqa", "targets/qwen3_bias_yarn", "targets/llama3", "drafts/dflash_headdim"])  # fmt: skip
def test_expected_shapes_are_the_checkpoints_own(golden, folder):
    expected, tensors = read(golden / folder)
    assert expected == {keys.path_of(n): t.shape for n, t in tensors.items()}


def test_assembling_copies_every_tensor_bit_for_bit(target):
    expected, tensors = target
    params = assemble(tensors.items(), expected, "here")
    for name, value in tensors.items():
        got = np.asarray(keys.flatten(params)[keys.path_of(name)])
        np.testing.assert_array_equal(got.view(np.uint8), value.view(np.uint8))


def test_assembling_casts_to_the_dtype_asked_for(target):
    expected, tensors = target
    params = assemble(tensors.items(), expected, "here", jnp.bfloat16)
    got = params["layers_1"]["mlp"]["up_proj"]["weight"]
    np.testing.assert_array_equal(np.asarray(got), tensors[UP].astype(ml_dtypes.bfloat16))


def test_one_error_names_every_unknown_missing_duplicated_and_misshapen_tensor(target):
    expected, tensors = target
    renamed = tensors.pop("model.layers.0.mlp.up_proj.weight")
    tensors["model.layers.0.mlp.up_proj_.weight"] = renamed
    tensors["extra.scale"] = np.ones((3,), np.float32)
    tensors["model.norm.weight"] = np.ones((47,), np.float32)
    tensors["embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match="at fault") as e:
        assemble(tensors.items(), expected, "some/folder")
    text = str(e.value)
    assert "\n" not in text
    for part in (
        "some/folder: 5 tensors at fault",
        "unknown model.layers.0.mlp.up_proj_.weight [64, 48]",
        "unknown extra.scale [3]",
        "missing model.layers.0.mlp.up_proj.weight [64, 48]",
        "misshapen model.norm.weight [47], expected [48]",
        "duplicated embed_tokens.weight [256, 48], also given as model.embed_tokens.weight",
    ):
        assert part in text


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "largest",
    [lambda x: values.largest(np.asarray(x)), values.largest_on_device],
    ids=["host", "device"],
)
def test_one_nan_among_many_is_found_on_the_host_and_on_devices(largest, dtype):
    """A maximum of floats passes over it in XLA's CPU backend."""
    values = np.zeros((300, 200), dtype)
    values[17, 3] = -3
    assert np.asarray(largest(jnp.asarray(values))) == 3
    for value in (np.nan, -np.nan):
        values[170, 30] = value
        assert np.isnan(np.asarray(largest(jnp.asarray(values))).astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinities_are_an_error_naming_the_tensor(target, dtype, value):
    expected, tensors = target
    tensors[UP] = tensors[UP].astype(dtype)
    tensors[UP][3, 4] = value
    with pytest.raises(ValueError, match=f"{UP} .* NaN or infinities"):
        assemble(tensors.items(), expected, "here")


def test_a_matrix_of_zeros_is_an_error_but_a_zero_bias_is_not(golden):
    expected, tensors = read(golden / "targets/qwen3_bias_yarn")
    tensors["model.layers.0.self_attn.q_proj.bias"][:] = 0
    assemble(tensors.items(), expected, "here")
    tensors[UP][:] = 0
    with pytest.raises(ValueError, match=f"{UP} .* all zeros"):
        assemble(tensors.items(), expected, "here")


def test_quantised_integers_are_never_taken_for_weights(target):
    expected, tensors = target
    tensors[UP] = np.ones(tensors[UP].shape, np.int8)
    with pytest.raises(ValueError, match=f"{UP} .* int8, not floats"):
        assemble(tensors.items(), expected, "here", jnp.float32)


def test_rotary_buffers_are_dropped(target):
    expected, tensors = target
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones((4,), np.float32)
    assert keys.flatten(assemble(tensors.items(), expected, "here")).keys() == expected.keys()


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_targets_head_must_equal_the_embedding(tied, head_first):
    expected, tensors = tied
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}

    def whole():
        both = {**head, **tensors} if head_first else {**tensors, **head}
        return assemble(both.items(), expected, "here")

    assert "lm_head" not in whole()
    head["lm_head.weight"][5, 5] += 1e-6
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding"):
        whole()


def test_a_flat_draft_with_an_embedding_or_head_of_its_own_is_refused(golden):
    expected, tensors = read(golden / "drafts/dflash_headdim")
    tensors["embed_tokens.weight"] = tensors["lm_head.weight"] = np.ones((256, 48), np.float32)
    with pytest.raises(
        ValueError, match=r"unknown embed_tokens.*unknown lm_head\.weight \[256, 48\]"
    ):
        assemble(tensors.items(), expected, "here")


def test_a_draft_under_a_model_prefix_is_the_same(golden):
    expected, tensors = read(golden / "drafts/dflash_headdim")
    prefixed = {f"model.{name}": value for name, value in tensors.items()}
    params = assemble(prefixed.items(), expected, "here")
    np.testing.assert_array_equal(params["fc"]["weight"], tensors["fc.weight"])


def test_an_untied_target_without_its_head_is_an_error(target):
    expected, tensors = target
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        assemble(tensors.items(), expected, "here")
