"""What every dialect of a draft's config means, and what an export of it says."""

import dataclasses
import json

import pytest
from test_config import DRAFT, SHAPE, nested, without

from dflash_jax.config import DFlash2, Domino, DraftConfig, DSpark, write_flat

SLIDES = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True}
MIXED = {**SLIDES, "layer_types": ["sliding_attention", "full_attention"]}
SPECULATORS = {
    "speculators_model_type": "dflash", "block_size": 6, "mask_token_id": 253, "draft_vocab_size": 256,
    "aux_hidden_state_layer_ids": [1, 3], "sliding_window_non_causal": False, "sample_from_anchor": False,
    "architectures": ["DFlashDraftModel"], "transformer_layer_config": {**SHAPE, "rope_theta": 1e6},
}  # fmt: skip


def speculators(layers=(), **changes):
    inner = {**SPECULATORS["transformer_layer_config"], **dict(layers)}
    return {**SPECULATORS, "transformer_layer_config": inner, **changes}


def test_vllms_taps_count_from_one_and_must_say_the_same():
    eagle = {"eagle_aux_hidden_state_layer_ids": [1, 3]}
    for config in (nested(**eagle), {**nested(target_layer_ids=None), **eagle}):
        assert DraftConfig.from_hf(config).target_layer_ids == (0, 2)
    with pytest.raises(ValueError, match=r"eagle_aux_hidden_state_layer_ids=\[1, 3\] must be"):
        DraftConfig.from_hf(nested(**eagle, target_layer_ids=[1, 3]))


def layouts(config):
    return [(config.window(i), config.causal(i)) for i in range(config.num_hidden_layers)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [(None, False)] * 2),
        (SLIDES, [(4, True)] * 2),
        (MIXED, [(4, True), (None, False)]),
        ({**MIXED, "is_causal": False}, [(4, False), (None, False)]),
        ({**MIXED, "is_causal": True}, [(4, True), (None, True)]),
        ({"is_causal": True}, [(None, True)] * 2),
        ({**SLIDES, "is_causal": False}, [(4, False)] * 2),
        # transformers' own default: sliding from `max_window_layers` on
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, [(None, False), (4, True)]),
    ],
)  # fmt: skip
def test_windows_and_causality_of_flat_drafts(keys, expected):
    assert layouts(DraftConfig.from_hf({**DRAFT, **keys})) == expected


@pytest.mark.parametrize(
    ("causal", "expected"), [(None, [(8, False)] * 2), (True, [(8, True)] * 2)]
)
def test_vllms_use_swa_slides_every_layer_and_is_not_causal(causal, expected):
    config = nested(use_swa=True, swa_window_size=8, is_causal=causal)
    assert layouts(DraftConfig.from_hf(config)) == expected
    with pytest.raises(ValueError, match="use_swa and layer_types"):
        DraftConfig.from_hf({**config, **SLIDES})
    with pytest.raises(ValueError, match="lacks swa_window_size"):
        DraftConfig.from_hf(nested(use_swa=True))


@pytest.mark.parametrize("use", [False, None])
def test_sliding_layers_whose_window_is_switched_off_are_refused(use):
    config = {**DRAFT, **SLIDES, "use_sliding_window": use}
    with pytest.raises(ValueError, match=f"sliding_attention but use_sliding_window={use}"):
        DraftConfig.from_hf(config)
    with pytest.raises(ValueError, match="lacks sliding_window"):
        DraftConfig.from_hf({**DRAFT, **SLIDES, "sliding_window": None})


def test_jetspecs_contradiction_is_read_as_it_was_trained():
    with pytest.warns(UserWarning, match="taken as causal"):
        config = DraftConfig.from_hf({**nested(causal=True), "is_causal": False})
    assert config.is_causal is True
    assert DraftConfig.from_hf(nested(causal=True)).is_causal is True
    with pytest.raises(ValueError, match=r"is_causal is true but dflash_config\.causal is false"):
        DraftConfig.from_hf({**nested(causal=False), "is_causal": True})


@pytest.mark.parametrize(
    ("layers", "changes", "expected"),
    [
        ({}, {}, [(None, False)] * 2),
        (MIXED, {}, [(4, True), (None, False)]),
        (MIXED, {"sliding_window_non_causal": True}, [(4, False), (None, False)]),
        # what a converted flat draft says stands above the converter's default
        ({**SLIDES, "is_causal": False}, {}, [(4, False)] * 2),
        ({"is_causal": True}, {}, [(None, True)] * 2),
    ],
)
def test_windows_and_causality_of_speculators_drafts(layers, changes, expected):
    config = DraftConfig.from_hf(speculators(layers, **changes))
    assert layouts(config) == expected
    assert config.window_rule == "speculators"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (speculators(MIXED, sliding_window_non_causal=None), "sliding_window_non_causal"),
        (speculators({**MIXED, "is_causal": True}, sliding_window_non_causal=True), "is_causal is true"),
        (speculators(draft_vocab_size=None), "draft_vocab_size"),
        (speculators(aux_hidden_state_layer_ids=None), "target_layer_ids"),
        (speculators(aux_hidden_state_layer_ids=[0, 3]), "target_layer_ids"),
        (speculators(target_hidden_size=64), "target_hidden_size=64"),
        (speculators(speculators_model_type="xpress"), "xpress"),
        (speculators(speculators_model_type="dflash2"), "conv_kernel_size"),
        (speculators({"num_experts": 4}), r"transformer_layer_config\.num_experts"),
        (speculators(surprise=1), "surprise"),
    ],
)  # fmt: skip
def test_a_speculators_config_that_is_not_understood_is_an_error_naming_the_key(config, named):
    with pytest.raises(ValueError, match=named):
        DraftConfig.from_hf(config)


def test_speculators_count_taps_from_one_and_leave_the_depth_to_the_target():
    config = DraftConfig.from_hf(speculators())
    assert config.target_layer_ids == (0, 2)
    assert config.num_target_layers is None
    assert DraftConfig.from_hf(speculators(), num_target_layers=4).num_target_layers == 4
    assert DraftConfig.from_hf(speculators(), "default", num_target_layers=5).target_layer_ids == (1, 2)  # fmt: skip
    with pytest.raises(ValueError, match="needs num_target_layers"):
        DraftConfig.from_hf(speculators(), "default")


def test_a_whole_vocabulary_is_no_reduced_one():
    assert DraftConfig.from_hf(speculators()).draft_vocab_size is None
    config = DraftConfig.from_hf(speculators(draft_vocab_size=96))
    assert (config.draft_vocab_size, config.own_head) == (96, True)
    with pytest.raises(ValueError, match="draft_vocab_size=300"):
        DraftConfig.from_hf(speculators(draft_vocab_size=300))


def test_the_window_rule_is_the_dialects_unless_the_caller_knows_better():
    flat = {**DRAFT, **SLIDES}
    assert DraftConfig.from_hf(flat).window_rule == "zlab"
    trained_by_nemo = {**flat, "architectures": ["Qwen3DFlashDraftModel"]}
    assert DraftConfig.from_hf(trained_by_nemo).window_rule == "nemo"
    assert layouts(DraftConfig.from_hf(trained_by_nemo)) == [(4, False)] * 2
    assert DraftConfig.from_hf(flat, window_rule="specforge").window_rule == "specforge"


CONV = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
DOMINO = {"projector_type": "domino", "emb_dim": 8, "gru_hidden_dim": 12}


@pytest.mark.parametrize(
    ("config", "head"),
    [
        (DRAFT, None),
        (nested(**CONV), DFlash2(**CONV)),
        (speculators(speculators_model_type="dflash2", **CONV), DFlash2(**CONV)),
        (nested(**DOMINO), Domino(emb_dim=8, gru_hidden_dim=12)),
        (
            nested(**DOMINO, pure_draft_prefix_len=1, shift_label=True),
            Domino(emb_dim=8, gru_hidden_dim=12, pure_draft_prefix_len=1, shift_label=True),
        ),
        ({**DRAFT, "architectures": ["Qwen3DSparkModel"], "markov_rank": 4}, DSpark(markov_rank=4)),
    ],
)
def test_a_head_is_read_from_its_keys(config, head):
    read = DraftConfig.from_hf(config)
    assert read.head == head
    assert read.sample_from_anchor == isinstance(head, DSpark)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**DRAFT, "architectures": ["DFlash2DraftModel"]}, "lacks conv_kernel_size, conv_group_size"),
        (nested(selector_rank=8), "lacks conv_kernel_size"),
        (nested(**{**CONV, "conv_group_size": 7}), "conv_group_size=7"),
        (nested(projector_type="domino"), "lacks emb_dim, gru_hidden_dim"),
        (nested(projector_type="mlp"), "projector_type='mlp'"),
        (nested(**CONV, **DOMINO), "several heads: DFlash2, Domino"),
        (nested(markov_rank=4, markov_head_type="rnn"), "markov_head_type='rnn'"),
        (nested(output_multiplier=-1.0), "output_multiplier=-1"),
        (nested(input_embedding_scale="2"), "input_embedding_scale='2'"),
        ({**DRAFT, "is_causal": 1}, "is_causal=1"),
    ],
)  # fmt: skip
def test_a_head_or_knob_that_is_not_understood_is_an_error_naming_the_key(config, named):
    with pytest.raises(ValueError, match=named):
        DraftConfig.from_hf(config)


@pytest.mark.parametrize(
    "keys",
    [
        {}, {"is_causal": True}, SLIDES, MIXED, {**MIXED, "is_causal": False},
        nested(input_embedding_scale=1.5, output_multiplier=0.5, final_logit_softcapping=30.0), nested(**CONV),
        nested(**DOMINO, shift_label=True),
    ],
)  # fmt: skip
def test_an_export_says_all_that_was_read(keys):
    config = DraftConfig.from_hf({**DRAFT, **keys})
    assert DraftConfig.from_hf(json.loads(json.dumps(write_flat(config)))) == config


def test_an_export_spells_out_windows_and_causality():
    raw = write_flat(DraftConfig.from_hf({**DRAFT, **SLIDES}))
    assert raw["use_sliding_window"] is True
    assert (raw["sliding_window"], raw["max_window_layers"]) == (4, 2)
    assert raw["is_causal"] is raw["dflash_config"]["causal"] is True
    assert write_flat(DraftConfig.from_hf({**DRAFT, **MIXED}))["is_causal"] is None
    assert write_flat(DraftConfig.from_hf(DRAFT))["is_causal"] is False
    assert write_flat(DraftConfig.from_hf(nested(**CONV)))["architectures"] == ["DFlash2DraftModel"]


def test_rules_that_come_to_the_same_are_exported():
    config = DraftConfig.from_hf({**DRAFT, **SLIDES, "sliding_window": 6, "is_causal": False})
    raw = write_flat(dataclasses.replace(config, window_rule="nemo"))
    assert DraftConfig.from_hf(raw) == config
    full = dataclasses.replace(DraftConfig.from_hf(DRAFT), window_rule="speculators")
    assert write_flat(full) == write_flat(DraftConfig.from_hf(DRAFT))


def test_a_flat_config_without_its_depth_is_refused():
    with pytest.raises(ValueError, match="num_target_layers"):
        DraftConfig.from_hf(without(DRAFT, "num_target_layers"))
