"""Loading from mapped safetensors is loading; see tests/test_mesh.py for what is read."""

import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from fakes import leaves_equal
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoint import hf
from dflash_jax.pair import load_draft, load_target
from dflash_jax.sharding import make_mesh

UP, EXPERT = "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(devices=jax.devices()[:1])


@pytest.fixture
def damaged(golden, tmp_path):
    """A copy of a golden target whose tensors are what a function makes of them."""

    def make(name, change):
        folder = shutil.copytree(golden / "targets" / name, tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_gqa", "qwen3_sharded_bf16", "qwen3_moe", "qwen3_tied"])
def test_a_mapped_target_is_the_target(golden, mesh, name, dtype):
    plain = load_target(golden / "targets" / name, dtype)
    mapped = load_target(golden / "targets" / name, dtype, mesh)
    assert jax.tree.structure(mapped.params) == jax.tree.structure(plain.params)
    assert leaves_equal(mapped.params, plain.params)
    assert {x.dtype for x in jax.tree.leaves(mapped.params)} == {np.dtype(dtype)}
    assert {x.sharding.mesh for x in jax.tree.leaves(mapped.params)} == {mesh}


@pytest.mark.parametrize("name", ["dflash2", "domino", "speculators_reduced_vocab"])
def test_a_mapped_draft_is_the_draft(golden, mesh, name):
    target = load_target(golden / "targets/qwen3_gqa")
    plain, mapped = (load_draft(golden / "drafts" / name, target, sharding=x) for x in (None, mesh))
    assert mapped.config == plain.config
    assert leaves_equal(mapped.params, plain.params)
    assert {x.sharding.mesh for x in jax.tree.leaves(mapped.params)} == {mesh}


def test_fused_experts_are_read_by_their_parts(golden, damaged, mesh):
    """transformers 5's form: one tensor a projection of a layer, gate and up in one."""

    def fuse(tensors):
        experts = {k: tensors.pop(k) for k in list(tensors) if ".experts." in k}
        layers = sorted({k.split(".experts.")[0] for k in experts})
        for layer in layers:
            count = sum(k.startswith(layer) for k in experts) // 3

            def stack(part, layer=layer, count=count):
                return np.stack(
                    [experts[f"{layer}.experts.{e}.{part}.weight"] for e in range(count)]
                )

            gate_up = np.concatenate([stack("gate_proj"), stack("up_proj")], axis=1)
            tensors[f"{layer}.experts.gate_up_proj"] = gate_up
            tensors[f"{layer}.experts.down_proj"] = stack("down_proj")

    plain = load_target(golden / "targets/qwen3_moe")
    assert leaves_equal(load_target(damaged("qwen3_moe", fuse), sharding=mesh).params, plain.params)


def test_all_that_is_wrong_with_names_and_shapes_is_told_before_anything_is_read(
    damaged, mesh, monkeypatch
):
    def change(tensors):
        tensors["extra.scale"] = np.ones((3,), np.float32)
        tensors["model.norm.weight"] = np.ones((47,), np.float32)
        tensors["embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[UP] = np.ones(tensors[UP].shape, np.int8)
        del tensors["lm_head.weight"]

    monkeypatch.setattr("dflash_jax.checkpoint.mapped.read_part", None)
    with pytest.raises(ValueError, match="5 tensors at fault") as e:
        load_target(damaged("qwen3_gqa", change), sharding=mesh)
    for part in (
        "unknown extra.scale [3]",
        "misshapen model.norm.weight [47], expected [48]",
        f"{UP} [64, 48] holds int8, not floats",
        "missing lm_head.weight [256, 48]",
        "embed_tokens.weight [256, 48], also given as ",
    ):
        assert part in str(e.value)


def test_values_are_checked_where_they_lie_and_told_at_once(damaged, mesh):
    def change(tensors):
        tensors[UP][3, 4] = np.nan
        tensors["lm_head.weight"][:] = 0

    with pytest.raises(ValueError, match="2 tensors at fault") as e:
        load_target(damaged("qwen3_gqa", change), sharding=mesh)
    assert f"{UP} [64, 48] holds NaN" in str(e.value)
    assert "lm_head.weight [256, 48] is all zeros" in str(e.value)


def test_experts_of_one_stack_have_one_dtype(damaged, mesh):
    def change(tensors):
        tensors[EXPERT] = tensors[EXPERT].astype(ml_dtypes.bfloat16)

    with pytest.raises(ValueError, match=r"experts/up_proj/weight .*dtypes: bfloat16, float32"):
        load_target(damaged("qwen3_moe", change), sharding=mesh)


def test_a_tied_targets_head_must_equal_the_embedding(golden, damaged, mesh):
    def tie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    def untie(tensors):
        tie(tensors)
        tensors["lm_head.weight"][5, 5] += 1e-6

    plain = load_target(golden / "targets/qwen3_tied")
    folder = damaged("qwen3_tied", tie)
    assert leaves_equal(load_target(folder, sharding=mesh).params, plain.params)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding"):
        load_target(damaged("qwen3_tied", untie), sharding=mesh)


def test_a_draft_of_another_vocabulary_than_its_mask_is_refused(golden, tmp_path, mesh):
    folder = shutil.copytree(golden / "drafts/speculators_reduced_vocab", tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    tensors["t2d"] = np.roll(tensors["t2d"], 1)
    save_file(tensors, folder / "model.safetensors")
    target = load_target(golden / "targets/qwen3_gqa")
    with pytest.raises(ValueError, match="t2d and d2t name different ids"):
        load_draft(folder, target, sharding=mesh)


def test_a_truncated_file_is_an_error_naming_it(golden, tmp_path, mesh):
    folder = shutil.copytree(golden / "targets/qwen3_gqa", tmp_path / "target")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or corrupt"):
        load_target(folder, sharding=mesh)


def test_a_scalar_and_an_empty_tensor_are_mapped(tmp_path):
    tensors = {"a": np.full((), 3, np.float32), "b": np.zeros((0, 4), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    got = dict(hf.map_tensors(tmp_path))
    assert (got["a"].shape, got["b"].shape, float(got["a"])) == ((), (0, 4), 3.0)
