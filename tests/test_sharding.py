import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import DRAFT as DRAFT_CONFIG
from fakes import TARGET as TARGET_CONFIG
from fakes import leaves_equal, random_params
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from dflash_jax import sharding
from dflash_jax.cache import KVCache
from dflash_jax.checkpoint import keys, orbax
from dflash_jax.pair import load_target
from dflash_jax.sharding import BATCH, CACHE, DRAFT, EVERYWHERE, TARGET, make_mesh, spec_of
from train.config import TrainConfig
from train.optimizer import make_optimizer

MESH = AbstractMesh((2, 4, 2), sharding.AXES)


@pytest.mark.parametrize(
    ("path", "shape", "target", "draft"),
    [
        ("layers_0/self_attn/q_proj/weight", (64, 48), P("model"), P("model", "fsdp")),
        ("layers_0/self_attn/k_proj/bias", (32,), P("model"), P("model")),
        ("layers_11/self_attn/o_proj/weight", (48, 64), P(None, "model"), P("fsdp", "model")),
        ("layers_0/mlp/up_proj/weight", (96, 48), P("model"), P("model", "fsdp")),
        ("layers_0/mlp/down_proj/weight", (48, 96), P(None, "model"), P("fsdp", "model")),
        ("layers_0/mlp/down_proj/bias", (48,), P(), P()),
        ("layers_0/mlp/experts/down_proj/weight", (8, 48, 96), P("model"), P("model", None, "fsdp")),
        ("layers_0/mlp/gate/weight", (8, 48), P(), P(None, "fsdp")),
        ("embed_tokens/weight", (100, 48), P("model"), P("model", "fsdp")),
        ("lm_head/weight", (100, 48), P("model"), P("model", "fsdp")),
        ("fc/weight", (48, 96), P("model"), P("model", "fsdp")),
        ("successor_codebook", (100, 8), P("model"), P("model", "fsdp")),
        ("norm/weight", (48,), P(), P()),
        ("d2t", (48,), P(), P()),
        ("step", (), P(), P()),
    ],
)  # fmt: skip
def test_a_parameter_lies_where_the_table_says(path, shape, target, draft):
    assert spec_of(path, shape, MESH, TARGET) == target
    assert spec_of(path, shape, MESH, DRAFT) == draft


def test_a_dimension_that_an_axis_does_not_divide_is_whole():
    assert spec_of("lm_head/weight", (101, 48), MESH, TARGET) == P()
    assert spec_of("lm_head/weight", (101, 48), MESH, DRAFT) == P(None, "fsdp")
    assert spec_of("fc/weight", (50, 54), MESH, DRAFT) == P("model")
    assert spec_of("tokens", (6, 8), MESH, BATCH) == P("data")  # not by all 8, but by 2
    assert spec_of("tokens", (5, 8), MESH, BATCH) == P()


def test_the_largest_dimension_that_divides_is_the_one_of_fsdp():
    assert spec_of("weight", (98, 48, 64), MESH, DRAFT) == P(None, None, "fsdp")


def test_a_head_is_never_split():
    three = dataclasses.replace(TARGET_CONFIG, num_attention_heads=6, num_key_value_heads=3)
    rules, H = TARGET.of(three), three.head_dim
    assert spec_of("layers_0/self_attn/k_proj/weight", (3 * H, 32), MESH, rules) == P()
    assert spec_of("layers_0/self_attn/q_proj/weight", (6 * H, 32), MESH, rules) == P("model")
    assert spec_of("layers_0/self_attn/o_proj/weight", (32, 3 * H), MESH, rules) == P()
    assert spec_of("layers_0/mlp/up_proj/weight", (2 * 3, 32), MESH, rules) == P("model")


def test_a_cache_lies_by_rows_and_heads():
    cache = KVCache.zeros(2, 8, 2, 16, 4, jnp.float32)
    found = sharding.shardings(cache, MESH, CACHE)
    assert {x.spec for x in (*found.k, *found.v)} == {P(("data", "fsdp"), "model")}
    assert found.length.spec == P()  # small, and every process reads it


def test_the_optimizers_moments_lie_with_their_parameters():
    params = random_params(DRAFT_CONFIG, 0)
    rules = DRAFT.of(DRAFT_CONFIG)
    own = sharding.shardings(params, MESH, rules)
    state = jax.eval_shape(make_optimizer(TrainConfig(run="")).init, params)
    moments = jax.tree.leaves_with_path(sharding.shardings(state, MESH, rules))
    named = [(jax.tree_util.keystr(p, simple=True, separator="/"), x.spec) for p, x in moments]
    for path, where in keys.flatten(own).items():
        assert [spec for name, spec in named if name.endswith(f"/{path}")] == [where.spec] * 2


def test_without_a_mesh_nothing_is_moved():
    tree = {"a": np.ones(3)}
    assert sharding.place(tree, BATCH) is tree
    assert sharding.constrain(tree, BATCH) is tree


def test_a_mesh_has_as_many_devices_as_there_are():
    mesh = make_mesh({"fsdp": 1}, jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "model": 1}
    with pytest.raises(ValueError, match="is of 16 devices, but there are 1"):
        make_mesh({"data": 4, "model": 4}, jax.devices()[:1])
    with pytest.raises(ValueError, match="must have no other axes"):
        make_mesh({"tensor": 1}, jax.devices()[:1])


@pytest.mark.parametrize("kind", ["hugging face", "orbax"])
def test_a_target_is_loaded_where_it_is_wanted(golden, tmp_path, kind):
    path = golden / "targets/qwen3_gqa"
    plain = load_target(path)
    if kind == "orbax":
        path = tmp_path / "orbax"
        orbax.save(path, "target", plain.config, plain.params)
    mesh = make_mesh(devices=jax.devices()[:1])
    asked = []

    def place(path, shape):
        asked.append(path)
        return sharding.placement(mesh, TARGET)(path, shape)

    target = load_target(path, sharding=place)
    assert set(asked) == set(keys.flatten(plain.params))
    assert leaves_equal(target.params, plain.params)
    assert target.params["lm_head"]["weight"].sharding.spec == P("model")
    gathered = sharding.gathered(target.params)
    assert leaves_equal(gathered, sharding.shard(plain.params, mesh, EVERYWHERE))
