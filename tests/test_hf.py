import json
import shutil

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoint import hf


@pytest.fixture
def folder(golden, tmp_path):
    """A copy of a golden target, to be damaged."""
    return shutil.copytree(golden / "targets/qwen3_gqa", tmp_path / "target")


@pytest.fixture
def sharded(golden, tmp_path):
    return shutil.copytree(golden / "targets/qwen3_sharded_bf16", tmp_path / "sharded")


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_single_file_is_read_bit_for_bit(folder):
    expected = load_file(folder / "model.safetensors")
    got = dict(hf.read_tensors(folder))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)


def test_shards_are_read_in_their_own_dtype(sharded):
    names = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    got = dict(hf.read_tensors(sharded))
    assert got.keys() == names.keys()
    assert {v.dtype for v in got.values()} == {np.dtype(ml_dtypes.bfloat16)}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_files_are_read(tmp_path, dtype):
    value = np.arange(6, dtype=np.float32).reshape(2, 3).astype(dtype)
    save_file({"w": value}, tmp_path / "model.safetensors")
    ((name, got),) = hf.read_tensors(tmp_path)
    assert name == "w"
    assert got.dtype == value.dtype
    np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("keep", [0, 4, 100, -40])
def test_a_truncated_file_is_an_error_naming_it(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or corrupt") as e:
        list(hf.read_tensors(folder))
    assert "\n" not in str(e.value)


def test_a_corrupt_header_is_an_error_naming_the_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"x" * 100)
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or corrupt"):
        list(hf.read_tensors(folder))


def test_a_missing_shard_is_an_error_naming_it(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors, which is missing"):
        list(hf.read_tensors(sharded))


def test_an_index_that_disagrees_with_its_shards_is_an_error(sharded):
    path = sharded / "model.safetensors.index.json"
    names = json.loads(path.read_text())["weight_map"]
    name, shard = next(iter(names.items()))
    edit(path, weight_map={**names, "model.extra": shard})
    with pytest.raises(ValueError, match=r"disagree about \['model.extra'\]"):
        list(hf.read_tensors(sharded))
    edit(path, weight_map={k: v for k, v in names.items() if k != name})
    with pytest.raises(ValueError, match=f"disagree about .*{name}"):
        list(hf.read_tensors(sharded))


def test_an_index_never_leads_out_of_its_folder(sharded):
    path = sharded / "model.safetensors.index.json"
    edit(path, weight_map={"w": "../target/model.safetensors"})
    with pytest.raises(ValueError, match="no file name"):
        list(hf.read_tensors(sharded))


def test_a_folder_without_weights_is_an_error_naming_what_is_looked_for(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        list(hf.read_tensors(folder))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1'])
def test_a_broken_config_is_an_error_naming_the_file(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        hf.read_config(folder)


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        hf.read_config(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 1}, (5,)),
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 1}, (5, 7)),
        ({"eos_token_id": 0}, {"eos_token_id": 1}, (0,)),
        ({}, {"eos_token_id": 1}, (1,)),
        (None, {"eos_token_id": [1, 2]}, (1, 2)),
        (None, {}, ()),
    ],
)
def test_stop_ids_are_the_generation_configs_or_else_the_configs(tmp_path, generation, config, ids):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert hf.read_stop_token_ids(tmp_path, config) == ids


@pytest.mark.parametrize("ids", ["</s>", [1, "2"], -1, True, 1.5])
def test_stop_ids_that_are_no_ids_are_an_error(tmp_path, ids):
    with pytest.raises(ValueError, match="eos_token_id"):
        hf.read_stop_token_ids(tmp_path, {"eos_token_id": ids})


def test_an_existing_path_is_taken_as_it_is(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder / "sub").mkdir()
    assert hf.resolve(folder) == folder
    assert hf.resolve("target/sub").samefile(folder / "sub")


@pytest.mark.parametrize("ref", ["", "nowhere", "/nowhere/at/all", "a/b/c", "./a/b", "a/model.gguf", "org/na me"])  # fmt: skip
def test_what_is_neither_a_path_nor_an_id_is_an_error(ref, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    if ref:
        with pytest.raises(ValueError, match="neither an existing path nor a hub id"):
            hf.resolve(ref)


def test_a_hub_id_is_downloaded_without_pickles(monkeypatch, tmp_path):
    asked = {}

    def download(ref, allow_patterns):
        asked.update(ref=ref, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hf.resolve("org/some-model.v2") == tmp_path
    assert asked["ref"] == "org/some-model.v2"
    assert {"*.safetensors", "*.json", "tokenizer*"} <= set(asked["patterns"])
    assert not any("bin" in p or "py" in p for p in asked["patterns"])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dflash_config": {}}, True),
        ({"architectures": ["DFlashDraftModel"]}, True),
        ({"architectures": ["Qwen3DFlashDraftModel"]}, True),
        ({"architectures": ["Qwen3ForCausalLM"]}, False),
        ({}, False),
    ],
)
def test_a_draft_is_known_by_its_config(config, expected):
    assert hf.is_draft(config) is expected


def test_a_folder_without_a_tokenizer_says_so(folder):
    with pytest.raises(ValueError, match="has no tokenizer files"):
        hf.load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="no readable tokenizer"):
        hf.load_tokenizer(folder)
