"""Multimodal targets: the text model's config and tensors are found, whatever wraps them."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert import orbax_to_hf
from dflash_jax import pair
from dflash_jax.checkpoint import hf, keys
from dflash_jax.checkpoint.experts import split_fused
from dflash_jax.config import TargetConfig

# How transformers 5, and 4, name a text model's tensors.
LAYOUTS = {
    "nested": lambda name: name.replace("model.", "model.language_model."),
    "outer": lambda name: f"language_model.{name}",
}
IMAGES = {
    name: np.ones((2, 2), np.float32)
    for name in ("model.visual.blocks.0.w", "vision_tower.w", "multi_modal_projector.w", "image_newline")
}  # fmt: skip
MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}


def read(golden, name):
    folder = golden / "targets" / name
    return hf.read_config(folder), load_file(folder / "model.safetensors")


def wrap(folder, kind, raw, tensors, rename=LAYOUTS["nested"], **changes):
    """Writes a multimodal checkpoint around a text model; returns its folder."""
    folder.mkdir()
    whole = {
        "model_type": kind,
        "text_config": raw,
        "vision_config": {"depth": 2},
        "image_token_id": 3,
    }
    (folder / "config.json").write_text(json.dumps({**whole, **changes}))
    renamed = {rename(name): np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file({**renamed, **IMAGES}, folder / "model.safetensors")
    return folder


def assert_text_model(target, raw, tensors):
    assert target.config == TargetConfig.from_hf(raw)
    params = keys.flatten(target.params)
    assert params.keys() == keys.expected_shapes(target.config).keys()
    leaves = dict(split_fused(tensors.items()))
    for name, value in leaves.items():
        path = keys.path_of(name)
        expert = re.search(r"experts/(\d+)/", path)
        got = params[path.replace(expert[0], "experts/")][int(expert[1])] if expert else params[path]  # fmt: skip
        np.testing.assert_array_equal(got, value, err_msg=name)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("qwen3_vl", "qwen3_gqa", "qwen3_vl_text"),
        ("qwen3_vl", "qwen3_tied", "qwen3_vl_text"),
        ("internvl", "qwen3_moe", "qwen3_moe"),
        ("llava", "llama3", "llama"),
    ],
)
def test_the_text_model_of_a_wrapper_is_the_target(golden, tmp_path, kind, name, text, layout):
    raw, tensors = read(golden, name)
    inner = {**raw, "model_type": text}
    if kind == "qwen3_vl":
        inner["rope_parameters"] = {**raw["rope_parameters"], **MROPE}
    folder = wrap(tmp_path / "m", kind, inner, tensors, LAYOUTS[layout], eos_token_id=[9, 8])
    target = pair.read_target(folder)
    assert_text_model(target, raw, tensors)
    assert target.stop_token_ids == (9, 8)


@pytest.mark.parametrize(
    ("kind", "text", "whole", "inner", "tied"),
    [
        ("qwen3_vl", "qwen3_vl_text", False, True, False),
        ("qwen3_vl", "qwen3_vl_text", True, False, True),
        ("qwen3_vl", "qwen3_vl_text", None, True, True),
        ("llava", "llama", False, True, True),
        ("llava", "llama", None, None, False),
    ],
)
def test_whether_the_head_is_tied_is_the_wrappers_word(golden, kind, text, whole, inner, tied):
    raw = {**read(golden, "qwen3_gqa")[0], "model_type": text, "tie_word_embeddings": inner}
    config = {"model_type": kind, "text_config": raw, "tie_word_embeddings": whole}
    assert TargetConfig.from_hf(config).tie_word_embeddings is tied


def transposed(tensors, layers):
    """The tensors with experts as `qwen3_vl_moe` has them."""
    stacked = {}
    for name, value in split_fused(tensors.items()):
        stacked.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(value)
    flipped = {n: v[0] for n, v in stacked.items() if ".experts." not in n}
    for i in range(layers):
        prefix = f"model.layers.{i}.mlp.experts"
        gate, up, down = (np.stack(stacked[f"{prefix}.{p}_proj.weight"]) for p in ("gate", "up", "down"))  # fmt: skip
        flipped[f"{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1).swapaxes(1, 2)
        flipped[f"{prefix}.down_proj"] = down.swapaxes(1, 2)
    return flipped


def test_transposed_experts_are_turned_upright(golden, tmp_path):
    raw, tensors = read(golden, "qwen3_moe")
    narrow = {**raw, "moe_intermediate_size": 16}  # the golden one's width makes a square
    for name, value in (tensors := dict(split_fused(tensors.items()))).items():
        if ".experts." in name:
            tensors[name] = value[:, :16] if "down_proj" in name else value[:16]
    inner = {k: v for k, v in narrow.items() if k != "norm_topk_prob"}
    inner["model_type"] = "qwen3_vl_moe_text"
    experts = transposed(tensors, raw["num_hidden_layers"])
    folder = wrap(tmp_path / "m", "qwen3_vl_moe", inner, experts)
    assert_text_model(pair.read_target(folder), narrow, tensors)


def test_experts_that_fit_either_way_up_are_refused(golden, tmp_path):
    raw, tensors = read(golden, "qwen3_moe")
    inner = {**raw, "model_type": "qwen3_vl_moe_text"}
    experts = transposed(tensors, raw["num_hidden_layers"])
    folder = wrap(tmp_path / "m", "qwen3_vl_moe", inner, experts)
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj \[4, 48, 48\] is square"):
        pair.read_target(folder)


def test_a_text_model_is_exported_as_a_plain_target(golden, tmp_path, capsys):
    raw, tensors = read(golden, "qwen3_gqa")
    folder = wrap(tmp_path / "m", "qwen3_vl", {**raw, "model_type": "qwen3_vl_text"}, tensors)
    assert orbax_to_hf.main([str(folder), str(tmp_path / "plain")]) == 0
    assert "model_type, text_config.bos_token_id" in capsys.readouterr().err
    assert_text_model(pair.read_target(tmp_path / "plain"), raw, tensors)
    assert load_file(tmp_path / "plain/model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("qwen3_omni_moe", "qwen3_moe", "model_type='qwen3_omni_moe' is not a supported multimodal target"),
        ("mllama", "mllama_text_model", "model_type='mllama'"),
        ("llava", "mistral", "model_type='mistral' is not a supported target"),
        ("qwen3_5", "qwen3_5_text", r"recurrent layers \(qwen3_5, qwen3_5_text\)"),
    ],
)  # fmt: skip
def test_other_wrappers_and_text_models_are_refused_by_name(golden, tmp_path, kind, text, named):
    raw, tensors = read(golden, "qwen3_gqa")
    folder = wrap(tmp_path / "m", kind, {**raw, "model_type": text}, tensors)
    with pytest.raises(ValueError, match=named):
        pair.read_target(folder)


def test_a_quantised_wrapper_is_refused(golden, tmp_path):
    raw, tensors = read(golden, "qwen3_gqa")
    folder = wrap(tmp_path / "m", "llava", raw, tensors, quantization_config={"bits": 4})
    with pytest.raises(ValueError, match="quantization_config"):
        pair.read_target(folder)


@pytest.mark.parametrize("part", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_missing_embedding_or_head_is_an_error_that_lists_the_keys_there_are(
    golden, tmp_path, part
):
    raw, tensors = read(golden, "qwen3_gqa")
    other = f"text_tower.{part}"
    tensors[other] = tensors.pop(part)
    folder = wrap(tmp_path / "m", "llava", raw, tensors, LAYOUTS["outer"])
    with pytest.raises(ValueError, match=f"missing {part}") as e:
        pair.read_target(folder)
    assert f"unknown language_model.{other} [256, 48]" in str(e.value)
    there = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} - {part}
    assert str(e.value).endswith(f"outside its layers there are {', '.join(sorted(there))}")
