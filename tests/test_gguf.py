import contextlib
import json
import math
import re
import struct

import gguf
import numpy as np
import pytest
from fakes import assemble
from safetensors.numpy import load_file

from convert import hf_to_orbax, orbax_to_hf
from dflash_jax import pair
from dflash_jax.checkpoint import gguf as reader
from dflash_jax.checkpoint import keys
from dflash_jax.checkpoint.experts import split_fused
from dflash_jax.config import TargetConfig

LETTERS = [chr(i) for i in range(ord("!"), ord("~") + 1)]
TOKENS = [*LETTERS, "he", *(f"t{i}" for i in range(159)), "<|im_end|>", "<tool>"]
NAMES = {v: k for k, v in {**reader._LAYER, **reader._TOP}.items()}


def gguf_name(name):
    """llama.cpp's name of a Hugging Face tensor."""
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES.get(stem, stem)}.{suffix}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{suffix}"


def interleaved(value, heads):
    """llama.cpp's order of Llama's query and key rows, as its converter writes it."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


def write(path, arch, raw, tensors, extra=None, quantise=()):
    """Writes a GGUF file of a golden target."""
    w = gguf.GGUFWriter(str(path), arch)
    w.add_block_count(raw["num_hidden_layers"])
    w.add_context_length(raw["max_position_embeddings"])
    w.add_embedding_length(raw["hidden_size"])
    w.add_feed_forward_length(raw["intermediate_size"])
    w.add_head_count(raw["num_attention_heads"])
    w.add_head_count_kv(raw["num_key_value_heads"])
    w.add_key_length(raw["head_dim"])
    w.add_value_length(raw["head_dim"])
    w.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    w.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(TOKENS)
    w.add_token_types([1] * 254 + [3, 4])
    w.add_token_merges(["h e"])
    w.add_eos_token_id(254)
    add = {str: w.add_string, float: w.add_float32, bool: w.add_bool, int: w.add_uint32}
    for key, value in (extra or {}).items():
        add[type(value)](key, value)
    for name, value in tensors.items():
        kind = None
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = raw["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            value = interleaved(value, heads)
        if name in quantise:
            kind = gguf.GGMLQuantizationType.Q8_0
            value = gguf.quantize(value, kind)
        w.add_tensor(gguf_name(name), value, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.fixture
def llama(golden):
    folder = golden / "targets/llama3"
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.fixture
def qwen3(golden):
    folder = golden / "targets/qwen3_gqa"
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_gguf_file_gives_back_the_checkpoints_tensors_and_config(arch, request, tmp_path):
    raw, tensors = request.getfixturevalue(arch)
    path = write(tmp_path / "m.gguf", arch, raw, tensors)
    got = dict(reader.read_tensors(path))
    assert got.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    plain = {"rope_type": "default", "rope_theta": raw["rope_parameters"]["rope_theta"]}
    config = TargetConfig.from_hf(reader.read_config(path))
    assert config == TargetConfig.from_hf({**raw, "rope_parameters": plain})
    load(path)


def test_quantised_weights_are_close_to_the_original(qwen3, tmp_path):
    raw, tensors = qwen3
    name = "model.layers.0.mlp.down_proj.weight"
    path = write(tmp_path / "m.gguf", "qwen3", raw, tensors, quantise={name})
    got = dict(reader.read_tensors(path))[name]
    scale = np.abs(tensors[name]).max()
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, tensors[name], atol=scale / 200)


def test_the_end_of_turn_id_stops_too(llama, tmp_path):
    path = write(tmp_path / "m.gguf", "llama", *llama, extra={"tokenizer.ggml.eot_token_id": 255})
    assert reader.read_stop_token_ids(path) == (254, 255)


def test_a_file_that_was_replaced_is_read_again(llama, tmp_path):
    raw, tensors = llama
    path = write(tmp_path / "m.gguf", "llama", raw, tensors)
    assert reader.read_config(path)["max_position_embeddings"] == 512
    write(path, "llama", {**raw, "max_position_embeddings": 1024}, tensors, {"general.name": "new"})
    assert reader.read_config(path)["max_position_embeddings"] == 1024


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"lacks llama\.rope\.scaling\.factor"),
        ({"llama.rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type='longrope'"),
        ({"llama.rope.scaling.attn_factor": 0.5}, r"llama\.rope\.scaling\.attn_factor=0\.5"),
        ({"llama.expert_count": 4}, "4 experts"),
        ({"llama.rope.dimension_count": 6}, "different widths"),
    ],
)
def test_metadata_that_would_change_the_maths_is_an_error(llama, tmp_path, extra, named):
    path = write(tmp_path / "m.gguf", "llama", *llama, extra=extra)
    with pytest.raises(ValueError, match=named):
        reader.read_config(path)


LINEAR = {"rope_type": "linear", "factor": 2.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("extra", "rope"),
    [
        ({"type": "linear", "factor": 2.5}, LINEAR),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 128}, YARN),
        (
            {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0, "yarn_ext_factor": 1.0},
            {**YARN, "original_max_position_embeddings": 512, "beta_fast": 16.0},
        ),
    ],
)
def test_linear_and_yarn_scaling_are_read(qwen3, tmp_path, extra, rope):
    raw, tensors = qwen3
    extra = {f"qwen3.rope.scaling.{k}": v for k, v in extra.items()}
    path = write(tmp_path / "m.gguf", "qwen3", raw, tensors, extra)
    expected = TargetConfig.from_hf({**raw, "rope_parameters": {**rope, "rope_theta": 1e6}})
    assert TargetConfig.from_hf(reader.read_config(path)) == expected


def llama3_table(theta, head_dim, factor, original):
    """llama.cpp's divisors, as its converter computes them: in float32, one dimension at a time."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * np.float32(theta) ** np.float32(i / head_dim)
        smooth = (original / wavelength - 1) / 3
        blended = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(min(max(blended, 1), factor) if 0 < smooth < 1 else factor if smooth <= 0 else 1)  # fmt: skip
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(("context", "original"), [(131072, 8192), (6000, 6000)])
def test_llama3_scaling_is_found_from_its_table(llama, tmp_path, context, original):
    raw, tensors = llama
    raw = {**raw, "max_position_embeddings": context, "head_dim": 12}
    table = llama3_table(5e5, 12, 32.0, original)
    assert 1 == table[0] < table[3] < table[5] == 32  # a fast, a blended and a slow one
    path = write(tmp_path / "m.gguf", "llama", raw, {**tensors, "rope_freqs.weight": table})
    rope = load_config(path).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("llama3", 32.0, original)  # fmt: skip
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    load(path)


@pytest.mark.parametrize(
    "change",
    [lambda t: t * np.float32(1.001), lambda t: t[:-1], lambda t: t / 64, lambda t: t * np.inf],
)
def test_a_table_of_another_scaling_is_refused(llama, tmp_path, change):
    raw, tensors = llama
    table = change(llama3_table(5e5, 12, 32.0, 8192))
    path = write(tmp_path / "m.gguf", "llama", raw, {**tensors, "rope_freqs.weight": table})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        reader.read_config(path)


MIXTURE = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}


@pytest.fixture
def mixture(golden, tmp_path):
    """A golden mixture, and what a GGUF file of it is made from: experts stacked."""
    folder = golden / "targets/qwen3_moe"
    tensors = dict(split_fused(load_file(folder / "model.safetensors").items()))
    stacked = {}
    for name, value in tensors.items():
        stacked.setdefault(re.sub(r"experts\.\d+", "experts.{}", name), []).append(value)
    stacked = {n: np.stack(v) if "{}" in n else v[0] for n, v in stacked.items()}
    return json.loads((folder / "config.json").read_text()), tensors, stacked


def test_a_gguf_mixture_gives_back_the_checkpoints_tensors_and_config(mixture, tmp_path):
    raw, tensors, stacked = mixture
    extra = {f"qwen3moe.{k}": v for k, v in MIXTURE.items()}
    path = write(tmp_path / "m.gguf", "qwen3moe", raw, stacked, extra)
    got = dict(reader.read_tensors(path))
    assert got.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    assert load_config(path) == TargetConfig.from_hf(raw)
    load(path)
    for key, value in (("expert_shared_count", 1), ("expert_weights_norm", False)):
        extra[f"qwen3moe.{key}"] = value
        path = write(tmp_path / "m.gguf", "qwen3moe", raw, stacked, extra)
        with pytest.raises(ValueError, match=rf"qwen3moe\.{key}={value}"):
            reader.read_config(path)
        del extra[f"qwen3moe.{key}"]


def test_another_architecture_is_an_error(llama, tmp_path):
    path = write(tmp_path / "m.gguf", "mamba", *llama)
    with pytest.raises(ValueError, match="'mamba' is not supported"):
        reader.read_config(path)


def test_every_truncation_of_a_file_is_an_error_naming_it(llama, tmp_path):
    whole = write(tmp_path / "m.gguf", "llama", *llama).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [0, 3, 7, 30, *range(60, len(whole), len(whole) // 40), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf") as e:
            list(reader.read_tensors(path))
        assert "\n" not in str(e.value)


def test_tensors_that_do_not_fill_the_file_one_after_another_are_an_error(llama, tmp_path):
    path = write(tmp_path / "m.gguf", "llama", *llama)
    whole = path.read_bytes()
    first = next(
        iter(llama[1].values())
    ).nbytes  # where the second float32 (format 0) tensor starts
    place = struct.pack("<IQ", 0, first)
    assert whole.count(place) == 1
    for broken in (whole.replace(place, struct.pack("<IQ", 0, 0)), whole.replace(place, struct.pack("<IQ", 1, first)), whole + bytes(64)):  # fmt: skip
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"not at|before the file does"):
            list(reader.read_tensors(path))


def load_config(path):
    return TargetConfig.from_hf(reader.read_config(path))


def load(path):
    config = load_config(path)
    return assemble(reader.read_tensors(path), keys.expected_shapes(config), path)


def test_a_corrupt_header_reads_as_something_or_is_a_value_error(llama, tmp_path):
    whole = write(tmp_path / "m.gguf", "llama", *llama).read_bytes()
    path = tmp_path / "broken.gguf"
    rng = np.random.default_rng(0)
    for _ in range(40):
        broken = bytearray(whole)
        for at in rng.integers(0, 6000, 3):
            broken[at] = rng.integers(0, 256)
        path.write_bytes(broken)
        with contextlib.suppress(ValueError):
            load(path)


def test_the_tokenizer_keeps_special_tokens_whole(llama, tmp_path):
    path = write(tmp_path / "m.gguf", "llama", *llama)
    tokenizer = reader.read_tokenizer(path)
    assert tokenizer.eos_token_id == 254
    assert tokenizer("<|im_end|><tool>")["input_ids"] == [254, 255]
    assert tokenizer("hex")["input_ids"] == [TOKENS.index("he"), TOKENS.index("x")]
    assert tokenizer.decode([254, 255], skip_special_tokens=True) == "<tool>"


def test_a_gguf_file_keeps_its_tokenizer_through_a_conversion(llama, tmp_path):
    path = write(tmp_path / "m.gguf", "llama", *llama)
    assert hf_to_orbax.main([str(path), str(tmp_path / "ours")]) == 0
    target = pair.load_target(tmp_path / "ours")
    assert target.stop_token_ids == (254,)
    tokenizer = pair.load_tokenizer(target)
    assert tokenizer("hex<|im_end|>") == reader.read_tokenizer(path)("hex<|im_end|>")
    assert tokenizer.eos_token_id == 254
    assert orbax_to_hf.main([str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    back = pair.load_target(tmp_path / "back")
    assert (back.config, back.stop_token_ids) == (target.config, (254,))
    assert pair.load_tokenizer(back)("hex<|im_end|>") == tokenizer("hex<|im_end|>")
