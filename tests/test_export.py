"""Checkpoints out: every dialect's folders, what they cannot say, and what a conversion reports as lost."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from fakes import DRAFT, TARGET, random_draft, random_params
from safetensors.numpy import load_file

from convert import hf_to_orbax, orbax_to_hf
from dflash_jax import pair
from dflash_jax.checkpoint import export, hf, keys, orbax
from dflash_jax.checkpoint.experts import split_fused
from dflash_jax.config import (
    DFlash2,
    Domino,
    DSpark,
    MoeConfig,
    RopeConfig,
    write_flat,
    write_nested,
    write_target,
)

GOLDEN = Path(__file__).parent / "golden"
DRAFTS = sorted(p.name for p in (GOLDEN / "drafts").iterdir())
QUICK = ("dflash2", "dflash_mixed", "dflash_old_layout", "domino", "speculators_reduced_vocab")
TARGETS = sorted(p.name for p in (GOLDEN / "targets").iterdir())
DRAFT_LOST = {"bos_token_id", "eos_token_id", "transformers_version"}
NESTED_LOST = {
    "auto_map", "speculators_config.verifier.architectures", "speculators_config.verifier.name_or_path",
    "transformer_layer_config.bos_token_id", "transformer_layer_config.eos_token_id", "transformers_version",
}  # fmt: skip
TARGET_LOST = {
    "bos_token_id", "transformers_version", "generation_config.bos_token_id",
    "generation_config.transformers_version",
}  # fmt: skip
ALSO_LOST = {"domino": {"architectures"}, "dflash_old_layout": {"auto_map"}}
SLIDES = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 20}
MIXED = {**SLIDES, "layer_types": ("sliding_attention", "full_attention"), "is_causal": None}
CONV = DFlash2(conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=4)
OWN = {"own_embedding": True, "own_head": True}
NESTED = {"window_rule": "speculators", "num_target_layers": None}


def run(main, *args):
    assert main([str(a) for a in args]) == 0


def tensors_of(folder):
    """Every tensor by our path: codebooks' other spelling and fused experts are the same tensors."""
    pairs = split_fused(hf.read_tensors(folder))
    return {keys.path_of(name): value for name, value in pairs}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        assert got[path].dtype == value.dtype, path
        np.testing.assert_array_equal(
            np.asarray(got[path]).view(np.uint8), np.asarray(value).view(np.uint8), err_msg=path
        )


def lost(printed):
    start = "not kept of its config: "
    lines = [line.removeprefix(start) for line in printed.splitlines() if line.startswith(start)]
    return set(lines[0].split(", ")) if lines else set()


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.deep) for n in DRAFTS])  # fmt: skip
def test_a_golden_draft_goes_to_ours_and_back_bit_for_bit(name, tmp_path, capsys):
    source, nested = GOLDEN / "drafts" / name, name.startswith("speculators")
    raw = hf.read_config(source)
    given = ["--target-layer-ids", "default"] if name == "dflash_default_ids" else []
    run(hf_to_orbax.main, source, tmp_path / "ours", *given)
    expected = NESTED_LOST if nested else DRAFT_LOST | ALSO_LOST.get(name, set())
    assert lost(capsys.readouterr().err) == expected
    dialect = "speculators" if nested else "zlab"
    run(orbax_to_hf.main, tmp_path / "ours", tmp_path / "back", "--dialect", dialect)
    assert lost(capsys.readouterr().err) == set()
    assert_same(tensors_of(tmp_path / "back"), tensors_of(source))
    assert not any("codebook.weight" in info.name for info in hf.read_infos(tmp_path / "back"))
    back = pair.read_draft_config(tmp_path / "back")
    assert back == orbax.read_header(tmp_path / "ours").config
    again = pair.read_draft(tmp_path / "back", back)
    assert_same(keys.flatten(again.params), keys.flatten(orbax.load(tmp_path / "ours")[1]))
    assert set(export.not_kept(raw, hf.read_config(tmp_path / "back"))) == expected


@pytest.mark.parametrize("name", TARGETS)
def test_a_golden_target_goes_to_ours_and_back_bit_for_bit(name, tmp_path, capsys):
    source = GOLDEN / "targets" / name
    run(hf_to_orbax.main, source, tmp_path / "ours")
    assert lost(capsys.readouterr().err) == TARGET_LOST
    run(orbax_to_hf.main, tmp_path / "ours", tmp_path / "back")
    assert_same(tensors_of(tmp_path / "back"), tensors_of(source))
    before, after = pair.read_target(source), pair.read_target(tmp_path / "back")
    assert (after.config, after.stop_token_ids) == (before.config, before.stop_token_ids)
    assert_same(keys.flatten(after.params), keys.flatten(before.params))


@pytest.mark.parametrize(
    ("dialect", "changes"),
    [
        ("zlab", {"head": DSpark(markov_rank=4), "sample_from_anchor": True, **OWN}),
        ("zlab", {"head": Domino(emb_dim=8, gru_hidden_dim=12, shift_label=True)}),
        ("zlab", {**MIXED, "is_causal": False, "head": CONV, "output_multiplier": 0.5}),
        ("speculators", {**NESTED, "head": DSpark(markov_rank=4), "sample_from_anchor": True}),
        ("speculators", {**NESTED, "head": DSpark(markov_rank=4), "draft_vocab_size": 48}),
        ("speculators", {**NESTED, "sample_from_anchor": True, "draft_vocab_size": 48}),
        ("speculators", {**NESTED, "head": CONV, **SLIDES, "is_causal": False}),
        ("speculators", {**NESTED, **SLIDES, "is_causal": True, "attention_bias": True}),
        ("speculators", {**NESTED, **MIXED}),
        ("speculators", {**NESTED, **MIXED, "is_causal": False}),
    ],
)
def test_a_draft_of_ours_comes_back_from_its_dialect(dialect, changes, tmp_path):
    draft = random_draft(dataclasses.replace(DRAFT, **changes))
    export.save_draft(tmp_path / "a", draft.config, draft.params, None, dialect=dialect)
    back = pair.read_draft(tmp_path / "a", pair.read_draft_config(tmp_path / "a"))
    assert back.config == draft.config
    assert_same(keys.flatten(back.params), keys.flatten(draft.params))


MOE = MoeConfig(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama", "qk_norm": False, "mlp_bias": True, "tie_word_embeddings": True},
        {"model_type": "qwen3_moe", "moe": MOE, "layer_types": ("sliding_attention",) * 3, "sliding_window": 9},
        {"layer_types": ("full_attention",) * 3, "sliding_window": 9},
        {"rope": RopeConfig(1e4, "longrope", 4.0, 64, short_factor=(1.0,) * 4, long_factor=(2.0,) * 4)},
    ],
)  # fmt: skip
def test_a_target_of_ours_comes_back(changes, tmp_path):
    config = dataclasses.replace(TARGET, **changes)
    params = random_params(config, 0, jnp.bfloat16)
    (tmp_path / "tokenizer.json").write_text("{}")
    export.save_target(
        tmp_path / "a", config, params, stop_token_ids=(5, 7), pad_token_id=3,
        tokenizer_files=[tmp_path / "tokenizer.json"],
    )  # fmt: skip
    back = pair.read_target(tmp_path / "a")
    assert (back.config, back.stop_token_ids, back.pad_token_id) == (config, (5, 7), 3)
    assert_same(keys.flatten(back.params), keys.flatten(params))
    assert (tmp_path / "a/tokenizer.json").read_text() == "{}"
    raw = hf.read_config(tmp_path / "a")
    assert raw["dtype"] == raw["torch_dtype"] == "bfloat16"
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"]
    assert not [n for n in load_file(tmp_path / "a/model.safetensors") if "experts/" in n]


def test_speculators_config_says_what_its_readers_need():
    raw = write_nested(dataclasses.replace(DRAFT, **NESTED), "org/target")
    assert raw["aux_hidden_state_layer_ids"] == [1, 3]
    method = raw["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == DRAFT.block_size - 1
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    # vLLM takes either for the rule of every layer.
    assert raw["transformer_layer_config"]["is_causal"] is False
    assert raw["sliding_window_non_causal"] is True
    causal = dataclasses.replace(DRAFT, **NESTED, **MIXED)
    assert write_nested(causal)["sliding_window_non_causal"] is False
    assert "is_causal" not in write_nested(causal)["transformer_layer_config"]
    anchored = write_nested(dataclasses.replace(DRAFT, **NESTED, sample_from_anchor=True))
    method = anchored["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == DRAFT.block_size


def test_dspark_is_flat_as_nemo_has_it():
    config = dataclasses.replace(DRAFT, head=DSpark(markov_rank=4), sample_from_anchor=True, **OWN)
    raw = write_flat(config)
    assert raw["architectures"] == ["Qwen3DSparkModel"]
    assert (raw["markov_rank"], raw["markov_head_type"]) == (4, "vanilla")
    assert (raw["mask_token_id"], raw["target_layer_ids"]) == (33, [0, 2])
    assert raw["enable_confidence_head"] is False


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window_rule": "zlab", **SLIDES}, "window_rule='zlab'"),
        ({"window_rule": "nemo", **SLIDES}, "window_rule='nemo'"),
        ({"is_causal": True}, "is_causal=True"),
        ({**MIXED, "is_causal": True}, "is_causal=True"),
        ({"num_target_layers": 3}, r"target_layer_ids=\(0, 2\)"),
        ({"head": Domino(emb_dim=8, gru_hidden_dim=12)}, r"head=Domino\(.*\)"),
        ({"own_head": True}, "own_head=True"),
        ({"own_embedding": True}, "own_embedding=True"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale=2.0"),
        ({"output_multiplier": 2.0}, "output_multiplier=2.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"last_tap": "pre_norm"}, "last_tap='pre_norm'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"qk_norm": False}, "qk_norm=False"),
    ],
)
def test_what_speculators_dialect_cannot_say_is_refused(changes, named):
    config = dataclasses.replace(DRAFT, **{**NESTED, **changes})
    with pytest.raises(ValueError, match=f"^{named} cannot be said in speculators' dialect$"):
        write_nested(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window_rule": "speculators", **SLIDES}, "window_rule='speculators'"),
        ({"window_rule": "nemo", **SLIDES, "sliding_window": 15}, "window_rule='nemo'"),
        ({"window_rule": "specforge", **SLIDES, "sliding_window": 15}, "window_rule='specforge'"),
        ({"sample_from_anchor": True}, "sample_from_anchor=True"),
        ({"draft_vocab_size": 48}, "draft_vocab_size=48, own_head=True"),
        ({"own_head": True}, "own_head=True"),
        ({"own_embedding": True}, "own_embedding=True"),
        ({"num_target_layers": None}, "num_target_layers=None"),
        ({"last_tap": "pre_norm"}, "last_tap='pre_norm'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"qk_norm": False}, "qk_norm=False"),
        (
            {"head": DSpark(markov_rank=4)},
            "sample_from_anchor=False, own_head=False, own_embedding=False",
        ),
    ],
)
def test_what_the_flat_dialect_cannot_say_is_refused(changes, named):
    with pytest.raises(ValueError, match=f"^{named} cannot be said in the flat dialect$"):
        write_flat(dataclasses.replace(DRAFT, **changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"qk_norm": False}, "qk_norm=False"),
        ({"model_type": "llama"}, "qk_norm=True"),
        (
            {"model_type": "llama", "qk_norm": False, "layer_types": ("sliding_attention",) * 3, "sliding_window": 9},
            r"layer_types=\(.*\), sliding_window=9",
        ),
        (
            {"model_type": "qwen3_moe", "moe": MOE, "sliding_window": 9,
             "layer_types": ("sliding_attention", "full_attention", "full_attention")},
            r"layer_types=\(.*\)",
        ),
    ],
)  # fmt: skip
def test_what_a_targets_config_cannot_say_is_refused(changes, named):
    config = dataclasses.replace(TARGET, **changes)
    with pytest.raises(ValueError, match=f"^{named} cannot be said in a {config.model_type} config$"):  # fmt: skip
        write_target(config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"use_cache": True, "initializer_range": 0.02, "is_causal": None, "_name_or_path": "x"}, []),
        ({"use_cache": False, "initializer_range": 0.01}, ["initializer_range", "use_cache"]),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, []),
        ({"rope_theta": 1e4, "rope_parameters": None}, ["rope_theta"]),
        ({"layer_types": None}, []),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "use_sliding_window": True},
         ["layer_types", "max_window_layers", "sliding_window", "use_sliding_window"]),
        ({"dtype": None, "torch_dtype": "float32"}, []),
        ({"dtype": "float16"}, ["dtype"]),
        ({"architectures": ["Qwen3DFlashDraftModel"]}, ["architectures"]),
        ({"dflash_config": {"mask_token_id": 33, "causal": False, "target_layer_ids": [0, 1]}},
         ["dflash_config.target_layer_ids"]),
    ],
)  # fmt: skip
def test_each_key_is_kept_or_named(changes, expected):
    written = export.draft_json(DRAFT, "float32")
    assert export.not_kept({**written, **changes}, written) == expected


def test_a_wider_list_of_stop_ids_keeps_the_configs():
    written = export.target_json(TARGET, "float32", (5, 7))
    assert export.not_kept({**written, "eos_token_id": 7}, written) == []
    assert export.not_kept({**written, "eos_token_id": [7, 8]}, written) == ["eos_token_id"]


def test_the_converter_translates_between_dialects(tmp_path, capsys):
    source = GOLDEN / "drafts/speculators_full"
    assert orbax_to_hf.main([str(source), str(tmp_path / "flat")]) == 1
    assert "num_target_layers=None cannot be said" in capsys.readouterr().err
    run(orbax_to_hf.main, source, tmp_path / "flat", "--num-target-layers", 4)
    raw = json.loads((tmp_path / "flat/config.json").read_text())
    assert raw["dflash_config"]["target_layer_ids"] == [0, 2]
    args = ["--dialect", "speculators", "--verifier", "org/name", "--dtype", "bfloat16"]
    run(orbax_to_hf.main, tmp_path / "flat", tmp_path / "nested", *args)
    raw = json.loads((tmp_path / "nested/config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [1, 3]
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "org/name"
    assert {str(t.dtype) for _, t in hf.read_tensors(tmp_path / "nested")} == {"bfloat16"}
    assert raw["dtype"] == "bfloat16"


def test_what_cannot_be_written_back_is_said(tmp_path, capsys):
    raw = export.draft_json(dataclasses.replace(DRAFT, **SLIDES, is_causal=False), "float32")
    raw |= {"architectures": ["Qwen3DFlashDraftModel"], "sliding_window": 4}
    draft = random_draft(dataclasses.replace(DRAFT, **SLIDES))
    export.save_draft(tmp_path / "nemo", draft.config, draft.params)
    (tmp_path / "nemo/config.json").write_text(json.dumps(raw))
    run(hf_to_orbax.main, tmp_path / "nemo", tmp_path / "ours")
    assert "could not be written back as it came: window_rule='nemo'" in capsys.readouterr().err
    assert orbax_to_hf.main([str(tmp_path / "ours"), str(tmp_path / "flat")]) == 1
    assert "window_rule='nemo' cannot be said" in capsys.readouterr().err


def test_the_converters_mistakes_are_one_line_and_status_1(tmp_path, capsys):
    draft, target = (str(GOLDEN / p) for p in ("drafts/dflash_all_causal", "targets/llama3"))
    out = str(tmp_path / "out")
    for args, said in (
        ([draft, out, "--dialect", "speculators"], "is_causal=True cannot be said"),
        ([draft, out, "--verifier", "org/name"], "verifier='org/name' cannot be said"),
        ([target, out, "--num-target-layers", "4"], "is a target: --num-target-layers is for drafts"),
        ([str(tmp_path / "nowhere"), out], "neither an existing path"),
        ([target, str(tmp_path)], "exists already"),
    ):  # fmt: skip
        assert orbax_to_hf.main(args) == 1
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_failed_export_leaves_nothing_behind(tmp_path):
    params = random_params(TARGET, 0)
    with pytest.raises(OSError, match="nowhere"):
        export.save_target(tmp_path / "a", TARGET, params, tokenizer_files=[tmp_path / "nowhere"])
    causal = dataclasses.replace(DRAFT, is_causal=True)
    with pytest.raises(ValueError, match=r"is_causal=True, target_layer_ids=\(0, 2\) cannot"):
        export.save_draft(tmp_path / "a", causal, random_params(causal, 0), dialect="speculators")
    assert not list(tmp_path.iterdir())
