import dataclasses
import json

import pytest

from dflash_jax.config import (
    DraftConfig,
    RopeConfig,
    TargetConfig,
    build_target_layer_ids,
    write_flat,
)

SHAPE = {
    "model_type": "qwen3", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 256, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
TARGET = {**SHAPE, "rope_theta": 1e6}
DRAFT = {
    **TARGET,
    "num_target_layers": 4,
    "dflash_config": {"block_size": 6, "mask_token_id": 253, "target_layer_ids": [0, 2]},
}


def without(config, *names):
    return {k: v for k, v in config.items() if k not in names}


def nested(**changes):
    inner = {**DRAFT["dflash_config"], **changes}
    return {**DRAFT, "dflash_config": {k: v for k, v in inner.items() if v is not None}}


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (24, 5, (1, 6, 11, 16, 21)),
        (28, 5, (1, 7, 13, 19, 25)),
        (40, 5, (1, 10, 19, 28, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 1, (18,)),
    ],
)
def test_the_formula_spreads_taps_as_the_reference_does(layers, taps, ids):
    assert build_target_layer_ids(layers, taps) == ids


def test_missing_tap_ids_are_an_error_that_names_the_key():
    with pytest.raises(ValueError, match="target_layer_ids"):
        DraftConfig.from_hf(nested(target_layer_ids=None))


def test_the_caller_gives_missing_tap_ids_or_asks_for_the_formula():
    config = {**nested(target_layer_ids=None), "num_target_layers": 5}
    assert DraftConfig.from_hf(config, (0, 3)).target_layer_ids == (0, 3)
    assert DraftConfig.from_hf(config, "default").target_layer_ids == (1, 2)


def test_given_tap_ids_stand_above_the_configs():
    assert DraftConfig.from_hf(DRAFT, (1, 3)).target_layer_ids == (1, 3)


@pytest.mark.parametrize("ids", [[0, 4], [-1, 2], [2, 0], [1, 1], [], ["0", 2], [0.0, 2]])
def test_tap_ids_must_be_distinct_ascending_layers_of_the_target(ids):
    with pytest.raises(ValueError, match="target_layer_ids"):
        DraftConfig.from_hf(nested(target_layer_ids=ids))


@pytest.mark.parametrize("name", ["block_size", "mask_token_id"])
def test_draft_keys_are_read_in_either_place_or_both(name):
    value = DRAFT["dflash_config"][name]
    for config in (DRAFT, {**nested(**{name: None}), name: value}, {**DRAFT, name: value}):
        assert getattr(DraftConfig.from_hf(config), name) == value


@pytest.mark.parametrize("name", ["block_size", "mask_token_id", "target_layer_ids"])
def test_draft_keys_given_twice_with_two_values_are_an_error(name):
    other = {"block_size": 8, "mask_token_id": 7, "target_layer_ids": [0, 1]}[name]
    with pytest.raises(ValueError, match=f"{name} is .* at the top level but .* in dflash_config"):
        DraftConfig.from_hf({**DRAFT, name: other})


def test_missing_draft_keys_are_named_together():
    config = without(nested(block_size=None, mask_token_id=None), "num_target_layers")
    with pytest.raises(ValueError, match="lacks block_size, mask_token_id, num_target_layers"):
        DraftConfig.from_hf(config)


def test_the_formula_needs_the_drafts_depth():
    config = without(nested(target_layer_ids=None), "num_hidden_layers")
    with pytest.raises(ValueError, match="num_hidden_layers"):
        DraftConfig.from_hf(config, "default")


def test_a_null_dflash_config_counts_as_absent():
    flat = {**DRAFT, **DRAFT["dflash_config"], "dflash_config": None}
    assert DraftConfig.from_hf(flat) == DraftConfig.from_hf(DRAFT)


@pytest.mark.parametrize(
    ("name", "value"),
    [("mask_token_id", 256), ("mask_token_id", -1), ("mask_token_id", "253"), ("block_size", 0), ("block_size", "6")],
)  # fmt: skip
def test_draft_values_out_of_bounds_are_an_error(name, value):
    with pytest.raises(ValueError, match=name):
        DraftConfig.from_hf(nested(**{name: value}))


@pytest.mark.parametrize("name", ["attention_sink_bias", "use_aux_hidden_state"])
def test_a_draft_knob_that_is_not_understood_is_an_error(name):
    with pytest.raises(ValueError, match=rf"dflash_config\.{name}"):
        DraftConfig.from_hf(nested(**{name: 2}))


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}, 1e7),
        ({"rope_theta": 1e7, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}, 1e7),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}}, 1e6),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}, 1e6),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6),
    ],
)
def test_the_rope_base_is_found_in_every_form(rope, theta):
    assert TargetConfig.from_hf({**SHAPE, **rope}).rope.theta == theta


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
        {
            "rope_theta": 1e6,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0},
        },
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn"}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "spiral"}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "twist": 1}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}},
    ],
)  # fmt: skip
def test_a_rope_base_that_is_missing_or_contradictory_is_an_error(rope):
    with pytest.raises(ValueError, match=r"rope|RoPE"):
        TargetConfig.from_hf({**SHAPE, **rope})


def test_both_transformers_forms_of_a_scaling_are_one_value():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32}
    old = {"rope_theta": 1e5, "rope_scaling": {"type": "yarn", **scaling}}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e5, **scaling}}
    assert RopeConfig.from_hf(old) == RopeConfig.from_hf(new) == RopeConfig.from_hf({**old, **new})


def test_the_head_width_is_the_configs_own_and_never_derived_for_qwen3():
    assert TargetConfig.from_hf({**TARGET, "head_dim": 128}).head_dim == 128
    with pytest.raises(ValueError, match="head_dim"):
        TargetConfig.from_hf(without(TARGET, "head_dim"))


def test_an_old_llama_config_implies_its_head_width():
    config = {**without(TARGET, "head_dim"), "model_type": "llama"}
    assert TargetConfig.from_hf(config).head_dim == 12


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "model_type='mamba'"),
        ({"num_experts": 4}, "num_experts"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "48"}, "hidden_size='48'"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
    ],
)
def test_a_config_that_would_change_the_maths_is_an_error_naming_the_key(change, named):
    with pytest.raises(ValueError, match=named):
        TargetConfig.from_hf({**TARGET, **change})


def test_every_golden_target_config_is_understood(golden):
    for folder in sorted((golden / "targets").iterdir()):
        raw = json.loads((folder / "config.json").read_text())
        config = TargetConfig.from_hf(raw)
        assert hash(config) == hash(TargetConfig.from_hf(raw))
        assert config.head_dim == raw["head_dim"]


@pytest.mark.parametrize("name", ["dflash_full", "dflash_headdim", "dflash_old_layout"])
def test_every_golden_draft_config_is_understood_and_survives_an_export(golden, name):
    folder = golden / "drafts" / name
    config = DraftConfig.from_hf(json.loads((folder / "config.json").read_text()))
    case = json.loads((folder / "case.json").read_text())
    assert config.target_layer_ids == tuple(case["resolved_target_layer_ids"])
    assert (config.block_size, config.mask_token_id) == (case["block_size"], case["mask_token_id"])
    assert DraftConfig.from_hf(json.loads(json.dumps(write_flat(config)))) == config


def test_an_exported_scaling_reads_back_as_the_same_rope():
    rope = RopeConfig(theta=1e5, rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    config = dataclasses.replace(DraftConfig.from_hf(DRAFT), rope=rope)
    assert DraftConfig.from_hf(json.loads(json.dumps(write_flat(config)))) == config


def test_an_exported_config_has_what_other_readers_need():
    config = write_flat(DraftConfig.from_hf(DRAFT))
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == config["dflash_config"]["block_size"] == 6
    assert config["dflash_config"]["mask_token_id"] == 253
    assert config["dflash_config"]["target_layer_ids"] == [0, 2]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert "partial_rotary_factor" not in config["rope_parameters"]
