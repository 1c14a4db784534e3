import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import CHUNK, TARGET, prompts_of, random_params, random_target
from safetensors.numpy import load_file

from dflash_jax import generate, load_target
from dflash_jax.cache import KVCache
from dflash_jax.config import check_target_layer_ids
from dflash_jax.models import apply
from dflash_jax.models.transformer import Transformer
from dflash_jax.pair import Target

CASES = [
    "llama3", "qwen3_bias_yarn", "qwen3_gqa", "qwen3_moe", "qwen3_sharded_bf16", "qwen3_sliding", "qwen3_tied", "qwen3_v4rope",
]  # fmt: skip
QUICK = ("llama3", "qwen3_bias_yarn", "qwen3_moe")
SLOTS = 16


@dataclasses.dataclass(frozen=True)
class Case:
    target: Target
    expected: dict[str, np.ndarray]
    tolerances: dict

    def close(self, actual, expected, kind):
        np.testing.assert_allclose(actual, expected, **self.tolerances[kind])


@functools.cache
def load_case(golden, name):
    folder = golden / "targets" / name
    tolerances = json.loads((folder / "case.json").read_text())["tolerances"]
    target = load_target(folder, dtype=jnp.float32)
    return Case(target, load_file(folder / "expected.safetensors"), tolerances)


@pytest.fixture(params=CASES)
def case(request, golden):
    return load_case(golden, request.param)


# Each compiles programs of its own.
@pytest.fixture(
    params=[c if c in QUICK else pytest.param(c, marks=pytest.mark.deep) for c in CASES]
)
def decoded(request, golden):
    return load_case(golden, request.param)


def empty_cache(config, rows=1, size=SLOTS):
    heads, width = config.num_key_value_heads, config.head_dim
    return KVCache.zeros(config.num_hidden_layers, rows, heads, size, width, jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def forward(module, params, tokens, cache):
    """Embeddings, normed hidden states, taps, logits, cache."""
    embedded = module.apply({"params": params}, tokens, method="embed")
    hidden, context, cache = module.apply({"params": params}, tokens, cache)
    logits = module.apply({"params": params}, hidden, method="logits")
    return embedded, hidden, context, logits, cache


def run(module, params, tokens, size=SLOTS):
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    return forward(module, params, tokens, empty_cache(module.config, size=size))


def every_layer(config):
    return tuple(range(config.num_hidden_layers))


# Parity with the reference


def padded_prompts(case):
    """Both prompts in one batch; padding behind a prompt changes nothing before it."""
    prompts = [case.expected[f"p{i}_prompt"] for i in range(2)]
    tokens = np.zeros((2, max(len(p) for p in prompts)), np.int32)
    for line, prompt in zip(tokens, prompts):
        line[: len(prompt)] = prompt
    return tokens, [len(p) for p in prompts]


def test_hidden_states_and_logits_equal_the_references(case):
    c = case.target.config
    tokens, lengths = padded_prompts(case)
    embedded, hidden, context, logits, _ = forward(
        Transformer(c, every_layer(c)), case.target.params, tokens, empty_cache(c, rows=2)
    )
    states = [embedded, *jnp.split(context, c.num_hidden_layers)]
    np.testing.assert_array_equal(states[-1], hidden)  # the last is after the final norm
    for i, n in enumerate(lengths):
        expected = case.expected[f"p{i}_hidden_states"]  # [L + 1, T, D], the embeddings first
        assert len(states) == len(expected)
        for ours, theirs in zip(states, expected):
            case.close(ours[:, i, :n].T, theirs, "hidden_states")
        case.close(logits[:, i, :n].T, case.expected[f"p{i}_logits"], "logits")


def test_a_last_tap_before_the_norm_equals_the_references(case):
    c = case.target.config
    tokens, lengths = padded_prompts(case)
    module = Transformer(c, (c.num_hidden_layers - 1,), "pre_norm")
    _, hidden, context, _, _ = forward(module, case.target.params, tokens, empty_cache(c, rows=2))
    for i, n in enumerate(lengths):
        case.close(context[:, i, :n].T, case.expected[f"p{i}_last_prenorm"], "last_prenorm")
    assert not np.allclose(context, hidden, atol=0.01)


def test_greedy_tokens_equal_the_references(decoded):
    case = decoded
    prompts = [case.expected[f"p{i}_prompt"].tolist() for i in range(2)]
    out = generate(case.target, None, prompts, max_new_tokens=48, stop_token_ids=())
    assert out.tokens == [case.expected[f"p{i}_greedy"].tolist() for i in range(2)]
    assert out.finish == ["length"] * 2


def test_full_float32_precision_is_in_force():
    x = jnp.asarray(1 + 2.0**-20).reshape(1, 1)
    assert float(jnp.dot(x, x)[0, 0]) > 1.0
    text = jax.jit(jnp.dot).lower(x, x).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in text


# Taps


@pytest.mark.parametrize("ids", [(), (2,), (0, 2), (0, 1, 2)])
def test_there_is_one_feature_for_each_tap_id(ids):
    module = Transformer(TARGET, ids)
    _, _, context, _, _ = run(module, random_params(TARGET, 0), [1, 2, 3])
    assert context.shape == (len(ids) * TARGET.hidden_size, 1, 3)


@pytest.mark.parametrize("ids", [(3,), (-1,), (0, 3), (-1, 1), (1, 0), (1, 1), ()])
def test_tap_ids_outside_the_layers_raise(ids):
    with pytest.raises(ValueError, match="target_layer_ids="):
        check_target_layer_ids(ids, TARGET.num_hidden_layers)
    check_target_layer_ids((0, 2), TARGET.num_hidden_layers)


def test_tap_i_is_the_state_after_layer_i():
    """Layers that overwrite nothing but add 1: the embedding is 0, so layer i leaves i + 1."""
    config = dataclasses.replace(
        TARGET, model_type="llama", qk_norm=False, attention_bias=True, rms_norm_eps=1e-6
    )
    params = jax.tree.map(jnp.zeros_like, random_params(config, 0))
    for i in range(config.num_hidden_layers):
        params[f"layers_{i}"]["self_attn"]["o_proj"]["bias"] += 1.0
    _, _, context, _, _ = run(Transformer(config, (0, 2), "pre_norm"), params, [5, 6])
    assert jnp.split(context, 2)[0].min() == jnp.split(context, 2)[0].max() == 1.0
    assert jnp.split(context, 2)[1].min() == jnp.split(context, 2)[1].max() == 3.0


# The cache


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("cuts", [(1,) * 15, (7, 8), (4, 1, 5, 5)])
def test_chunks_of_any_size_equal_one_forward(window, cuts):
    config = TARGET
    if window:
        kinds = ("sliding_attention", "full_attention", "sliding_attention")
        config = dataclasses.replace(TARGET, sliding_window=window, layer_types=kinds)
    module, params = Transformer(config, every_layer(config)), random_params(config, 0)
    prompt = prompts_of(15)[0]
    _, hidden, context, logits, _ = run(module, params, prompt)
    cache, parts, start = empty_cache(config), [], 0
    for width in cuts:
        tokens = jnp.asarray([prompt[start : start + width]], jnp.int32)
        _, h, c, lg, cache = forward(module, params, tokens, cache)
        assert cache.length.tolist() == [start], "the caller commits, not the model"
        start += width
        cache = cache.replace(length=cache.length + width)
        parts.append((h, c, lg))
    for whole, part in zip((hidden, context, logits), zip(*parts)):
        np.testing.assert_allclose(jnp.concatenate(part, axis=2), whole, rtol=1e-4, atol=1e-4)


def test_slots_behind_the_length_are_not_read():
    module, params = Transformer(TARGET, (0, 2)), random_params(TARGET, 0)
    tokens = jnp.asarray([prompts_of(6)[0]], jnp.int32)
    *_, cache = forward(module, params, tokens, empty_cache(TARGET))
    clean = cache.replace(length=jnp.asarray([3]))  # slots 3 to 5 are garbage of a rejected block
    dirty = clean.replace(
        k=tuple(k.at[:, :, 3:].set(1e3) for k in cache.k),
        v=tuple(v.at[:, :, 3:].set(-1e3) for v in cache.v),
    )
    more = tokens[:, 4:6]
    for x, y in zip(
        forward(module, params, more, clean)[:4], forward(module, params, more, dirty)[:4]
    ):
        np.testing.assert_array_equal(x, y)


def test_a_later_token_never_changes_an_earlier_one():
    module, params = Transformer(TARGET, every_layer(TARGET)), random_params(TARGET, 0)
    prompt = prompts_of(8)[0]
    changed = [*prompt[:5], 1, 2, 3]
    one, other = run(module, params, prompt), run(module, params, changed)
    for x, y in zip(one[:4], other[:4]):
        np.testing.assert_array_equal(x[:, :, :5], y[:, :, :5])
    assert not np.allclose(one[1][:, :, 5:], other[1][:, :, 5:])


def test_a_bfloat16_target_computes_in_bfloat16_and_gives_float32_logits():
    target = random_target(dtype=jnp.bfloat16)
    module = Transformer(TARGET, (0, 2))
    cache = KVCache.zeros(3, 2, 2, CHUNK, 8, jnp.bfloat16)
    tokens = jnp.asarray(prompts_of(5, 5), jnp.int32)
    _, hidden, context, logits, cache = forward(module, target.params, tokens, cache)
    assert hidden.dtype == context.dtype == cache.k[0].dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    exact = forward(module, random_target().params, tokens, empty_cache(TARGET, rows=2))[3]
    assert np.corrcoef(np.ravel(logits), np.ravel(exact))[0, 1] > 0.99


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [4, 8])
def test_a_block_has_the_same_bits_over_a_larger_cache(dtype, width):
    """When the cache grows depends on the draft; what the target says must not."""
    module = Transformer(TARGET)
    params = random_params(TARGET, 0, dtype)
    tokens = jnp.asarray(prompts_of(200 + width)[0], jnp.int32)[None]
    cache = KVCache.zeros(
        TARGET.num_hidden_layers, 1, TARGET.num_key_value_heads, 256, TARGET.head_dim, dtype
    )
    run = jax.jit(lambda tokens, cache: apply(module, params, tokens, cache))
    _, _, cache = run(tokens[:, :200], cache)
    cache = cache.replace(length=jnp.asarray([200], jnp.int32))
    block = tokens[:, 200:]
    hidden = run(block, cache)[0]
    for size in (512, 1024):
        np.testing.assert_array_equal(run(block, cache.resize(size))[0], hidden)
