"""Quantised targets: what is held, how exact it is, and that drafts change nothing."""

import dataclasses
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import DRAFT, TARGET, prompts_of, random_draft, random_params
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from dflash_jax import generate, load_target, ops, sharding
from dflash_jax.adapters import bind
from dflash_jax.cache import KVCache
from dflash_jax.checkpoint import keys, quantization
from dflash_jax.cli import options
from dflash_jax.decode import decode
from dflash_jax.models import apply
from dflash_jax.models.transformer import Transformer
from dflash_jax.ops.product import product, quantized_product
from dflash_jax.pair import Target, read_target
from dflash_jax.states import new_state

DTYPES = (jnp.float32, jnp.bfloat16)
TWO_LAYERS = dataclasses.replace(TARGET, num_hidden_layers=2, layer_types=())
ONE_LAYER = dataclasses.replace(
    DRAFT, num_hidden_layers=1, layer_types=(), target_layer_ids=(0, 1), num_target_layers=2
)


def quantized_target(config, dtype=jnp.float32):
    leaves = keys.flatten(jax.tree.map(np.asarray, random_params(config, 0)))
    order = quantization.paths(keys.expected_shapes(config))
    params = keys.build(quantization.stream(leaves.items(), dtype), order)
    return Target(config, params, (), source=Path())


@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_every_weight_is_within_half_a_step(scale_dtype):
    weight = np.random.default_rng(0).standard_normal((300, 40)).astype(np.float32)
    weight *= np.logspace(-30, 30, 300, dtype=np.float32)[:, None]  # as many roundings of a scale
    weight[7] = 0
    integers, scale = quantization.quantize(jnp.asarray(weight), scale_dtype)
    assert (integers.dtype, scale.dtype) == (jnp.int8, scale_dtype)
    step = np.asarray(scale, np.float64)[:, None]
    error = np.abs(weight - np.asarray(integers, np.float64) * step)
    assert np.all(error <= step / 2 * (1 + 1e-5))
    # All of the range is used, but by the row of zeros, which stays one.
    largest = np.abs(np.asarray(integers, np.int32)).max(axis=1)
    assert np.all((largest >= 126) & (largest <= 127) | (np.arange(300) == 7))
    assert (largest[7], np.asarray(scale)[7]) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 6), (500, 600), (2100, 600), (3, 400_000)])
def test_a_product_of_integers_is_the_product(dtype, shape):
    rng = np.random.default_rng(1)
    weight = rng.integers(-127, 128, shape).astype(np.int8)
    scale = rng.uniform(0.5, 2, shape[0]).astype(np.float32)
    x = jnp.asarray(rng.standard_normal((shape[1], 2, 1)), dtype)
    found = quantized_product(jnp.asarray(weight), jnp.asarray(scale), x)
    expected = product(jnp.asarray(weight, dtype), x) * scale[:, None, None]
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3 * shape[1] ** 0.5)


def dequantized(params):
    """Floats of the same values."""

    def of(node):
        if not isinstance(node, dict):
            return node
        if "scale" in node:
            scale = node["scale"].astype(jnp.float32)[:, None]
            kept = {name: leaf for name, leaf in node.items() if name != "scale"}
            return kept | {"weight": node["weight"].astype(jnp.float32) * scale}
        return {name: of(child) for name, child in node.items()}

    return of(params)


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantised_target_computes_what_its_dequantised_weights_do(tied):
    config = dataclasses.replace(TWO_LAYERS, tie_word_embeddings=tied, attention_bias=True)
    params = quantized_target(config).params
    model = Transformer(config, (0, 1))

    @jax.jit
    def run(params, tokens):
        cache = KVCache.zeros(2, 1, config.num_key_value_heads, 8, config.head_dim, jnp.float32)
        hidden, context, _ = apply(model, params, tokens, cache)
        return context, apply(model, params, hidden, method="logits")

    tokens = jnp.asarray(prompts_of(5))
    for found, expected in zip(run(params, tokens), run(dequantized(params), tokens)):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "tied", "drafts"),
    [(jnp.float32, True, 1), pytest.param(jnp.bfloat16, False, 2, marks=pytest.mark.deep)],
)
def test_drafts_change_nothing(dtype, tied, drafts):
    config = dataclasses.replace(TWO_LAYERS, tie_word_embeddings=tied)
    target = quantized_target(config, dtype)
    assert target.dtype == dtype
    prompts, options = prompts_of(3, 9), {"max_new_tokens": 20}
    plain = generate(target, None, prompts, **options, keep_state=True)
    assert plain.state.target.k[0].dtype == dtype
    for draft in (random_draft(ONE_LAYER, dtype=dtype), "lookup")[:drafts]:
        assert generate(target, draft, prompts, **options, block_size=4).tokens == plain.tokens


@pytest.mark.parametrize("whole", [2**20, 0])
def test_the_decode_loop_carries_no_float_copy_of_a_matrix(whole, monkeypatch):
    """XLA's CPU backend hoists a whole matrix's conversion out of the loop: see `ops.product`."""
    monkeypatch.setattr(ops.product, "_WHOLE", whole)
    jax.clear_caches()
    target = quantized_target(TWO_LAYERS)
    models, params = bind(target, None)
    state = new_state(target, [[1]], [1], (), 256)
    program = decode.lower(models, params, state, np.int32(1)).compile().as_text()
    loops = [line for line in program.splitlines() if " while(" in line]
    c = TWO_LAYERS
    for rows, columns in (
        (c.vocab_size, c.hidden_size),
        (c.intermediate_size, c.hidden_size),
        (c.hidden_size, c.intermediate_size),
    ):
        assert any(f"s8[{rows},{columns}]" in line for line in loops)
        assert not any(f"f32[{rows},{columns}]" in line for line in loops)


def test_a_target_is_quantised_as_it_is_read(golden):
    path = golden / "targets" / "qwen3_gqa"
    whole, small = read_target(path, jnp.bfloat16), read_target(path, jnp.bfloat16, quantize="int8")
    assert small.dtype == jnp.bfloat16
    found, given = keys.flatten(small.params), keys.flatten(whole.params)
    scales = {path for path in found if path.endswith("/scale")}
    assert found.keys() - scales == given.keys()
    for path, leaf in given.items():
        if leaf.ndim == 1:
            np.testing.assert_array_equal(found[path], leaf)
        else:
            assert found[path].dtype == jnp.int8
            assert found[quantization.scale_of(path)].dtype == jnp.bfloat16
    matrices = [leaf for leaf in given.values() if leaf.ndim == 2]
    assert len(scales) == len(matrices)
    saved = sum(leaf.nbytes for leaf in given.values()) - sum(leaf.nbytes for leaf in found.values())  # fmt: skip
    assert saved == sum(leaf.size - 2 * len(leaf) for leaf in matrices)


def test_one_matrix_is_held_at_a_time():
    held = []

    def leaves():
        for i in range(3):
            leaf = np.ones((4, 5), np.float32)
            held.append(weakref.ref(leaf))
            yield f"{i}/weight", leaf
            del leaf

    for _ in quantization.stream(leaves()):
        assert all(ref() is None for ref in held[:-1])


def test_leaves_on_a_mesh_stay_there_and_their_scales_go_there():
    mesh = sharding.make_mesh()
    place = sharding.placement(mesh, sharding.TARGET)
    path, weight = "layers_0/self_attn/q_proj/weight", random_params(TARGET, 0)["embed_tokens"]["weight"]  # fmt: skip
    placed = jax.device_put(weight, place(path, weight.shape))
    found = dict(quantization.stream([(path, placed)], placement=place))
    here = dict(quantization.stream([(path, np.asarray(weight))]))
    for name, leaf in found.items():
        assert leaf.sharding == place(name, leaf.shape)
        np.testing.assert_array_equal(leaf, here[name])


def test_a_scale_lies_as_its_rows_do():
    mesh = AbstractMesh((1, 1, 2), sharding.AXES)
    divided = {
        name: sharding.spec_of(f"layers_0/{name}_proj/scale", (8,), mesh, sharding.TARGET)
        for name in ("self_attn/q", "mlp/up", "mlp/down")
    }
    assert divided == {"self_attn/q": P("model"), "mlp/up": P("model"), "mlp/down": P()}
    assert sharding.spec_of("lm_head/scale", (8,), mesh, sharding.TARGET) == P("model")


def test_what_cannot_be_quantised_is_an_error(golden):
    with pytest.raises(ValueError, match="quantize='int5' must be None or one of int8"):
        load_target("anything", quantize="int5")
    with pytest.raises(ValueError, match="quantize='int8' is for dense targets, not for 4 experts"):
        read_target(golden / "targets" / "qwen3_moe", quantize="int8")


def test_the_command_line_knows_the_methods():
    assert options.QUANTIZE == quantization.METHODS
