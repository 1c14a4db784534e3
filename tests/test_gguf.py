import contextlib
import json
import struct

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from convert import hf_to_orbax
from dflash_jax import pair
from dflash_jax.checkpoint import gguf as reader
from dflash_jax.checkpoint import keys
from dflash_jax.config import TargetConfig

LETTERS = [chr(i) for i in range(ord("!"), ord("~") + 1)]
TOKENS = [*LETTERS, "he", *(f"t{i}" for i in range(159)), "<|im_end|>", "<tool>"]
NAMES = {v: k for k, v in {**reader._LAYER, **reader._TOP}.items()}


def gguf_name(name):
    """llama.cpp's name of a Hugging Face tensor."""
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{suffix}"
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
    for key, value in (extra or {}).items():
        w.add_string(key, value) if isinstance(value, str) else w.add_uint32(key, value)
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
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling"),
        ({"llama.expert_count": 4}, "experts"),
        ({"llama.rope.dimension_count": 6}, "different widths"),
    ],
)
def test_metadata_that_would_change_the_maths_is_an_error(llama, tmp_path, extra, named):
    path = write(tmp_path / "m.gguf", "llama", *llama, extra=extra)
    with pytest.raises(ValueError, match=named):
        reader.read_config(path)


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


def load(path):
    config = TargetConfig.from_hf(reader.read_config(path))
    return keys.assemble(reader.read_tensors(path), keys.expected_shapes(config), path)


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
