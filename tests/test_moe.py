import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import (
    TARGET,
    VOCAB,
    Decoder,
    assemble,
    new_tokens,
    prompts_of,
    random_draft,
    random_target,
    rows_of,
    script_of,
)
from safetensors.numpy import load_file, save_file

from dflash_jax import load_target
from dflash_jax.checkpoint import keys
from dflash_jax.config import MoeConfig, TargetConfig
from dflash_jax.models.moe import Router
from dflash_jax.ops import experts

E, K, D, F = 6, 2, 32, 16
MOE = MoeConfig(num_experts=E, num_experts_per_tok=K, moe_intermediate_size=F, norm_topk_prob=True)
SPARSE = dataclasses.replace(
    TARGET, model_type="qwen3_moe", moe=dataclasses.replace(MOE, mlp_only_layers=(1,))
)
UP = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture
def folder(golden):
    return golden / "targets/qwen3_moe"


@pytest.fixture
def checkpoint(folder):
    """(expected shapes, tensors) of the golden target."""
    config = TargetConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return keys.expected_shapes(config), load_file(folder / "model.safetensors")


# Config


@pytest.fixture
def raw(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_config_is_read_in_the_transformers_4_and_5_forms(raw):
    config = TargetConfig.from_hf(raw)
    assert config.moe == MoeConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    )
    assert config.qk_norm
    old = {**raw, "num_experts": raw.pop("num_local_experts")}
    assert TargetConfig.from_hf(old) == config


def test_layers_are_sparse_by_step_unless_they_are_listed(raw):
    config = TargetConfig.from_hf(
        {**raw, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    )
    assert [config.mixture(i) is not None for i in range(6)] == [0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": 0}, "num_experts=0 must be at least 1"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be at most num_experts=4"),
        ({"num_experts": 8}, "num_experts=8 and num_local_experts=4 disagree"),
        ({"moe_intermediate_size": "24"}, "moe_intermediate_size='24'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"norm_topk_prob": None}, "lacks norm_topk_prob"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers holds \[3\]"),
        ({"mlp_only_layers": [-1]}, r"mlp_only_layers=\[-1\]"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_a_bad_mixture_is_an_error_with_value_and_bound(raw, change, message):
    with pytest.raises(ValueError, match=message):
        TargetConfig.from_hf({**raw, **change})


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_a_mixture_and_its_model_type_go_together(model_type):
    with pytest.raises(ValueError, match=f"model_type='{model_type}' does not go with"):
        dataclasses.replace(SPARSE, model_type=model_type)
    with pytest.raises(ValueError, match="does not go with moe=None"):
        dataclasses.replace(SPARSE, moe=None)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_next"},
        {"model_type": "mamba"},
        {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}},
        {"model_type": "new", "layer_types": ["linear_attention", "full_attention"]},
        {"model_type": "new", "text_config": {"layer_types": ["linear_attention"]}},
        {"model_type": "new", "layers_block_type": ["mamba", "attention"]},
    ],
)
def test_recurrent_targets_are_refused_with_the_reason(config):
    with pytest.raises(ValueError, match=r"cannot be rewound .* not be lossless") as e:
        TargetConfig.from_hf(config)
    assert "\n" not in str(e.value)


# Checkpoints


def fused(tensors):
    """The same target as transformers 5 holds it."""
    out = {n: t for n, t in tensors.items() if ".experts." not in n}
    for i in range(3):
        at = f"model.layers.{i}.mlp.experts"
        gate, up, down = (
            np.stack([tensors[f"{at}.{e}.{p}_proj.weight"] for e in range(4)])
            for p in ("gate", "up", "down")
        )
        out |= {f"{at}.gate_up_proj": np.concatenate([gate, up], 1), f"{at}.down_proj": down}
    return out


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_experts_are_stacked_in_order_from_either_form(checkpoint, dtype):
    expected, tensors = checkpoint
    assert expected["layers_0/mlp/experts/gate_proj/weight"] == (4, 24, 48)
    assert expected["layers_0/mlp/experts/down_proj/weight"] == (4, 48, 24)
    for form in (tensors, dict(reversed(tensors.items())), fused(tensors)):
        params = assemble(form.items(), expected, "here", dtype)
        stack = params["layers_1"]["mlp"]["experts"]["up_proj"]["weight"]
        np.testing.assert_array_equal(stack[2], jnp.asarray(tensors[UP], stack.dtype))
        assert keys.flatten(params).keys() == expected.keys()


def test_every_fault_of_an_expert_is_named(checkpoint):
    expected, tensors = checkpoint
    at = "model.layers.0.mlp.experts"
    del tensors[f"{at}.1.gate_proj.weight"]
    tensors[f"{at}.4.up_proj.weight"] = tensors[f"{at}.3.up_proj.weight"]
    tensors[f"{at}.2.down_proj.weight"] = tensors[f"{at}.2.down_proj.weight"][:, :-1]
    tensors[UP.removeprefix("model.")] = tensors[UP]
    tensors["model.layers.2.mlp.experts.0.up_proj.weight"][3, 4] = np.nan
    with pytest.raises(ValueError, match="5 tensors at fault") as e:
        assemble(tensors.items(), expected, "here")
    for part in (
        f"missing {at}.1.gate_proj.weight [24, 48]",
        f"unknown {at}.4.up_proj.weight [24, 48]",
        f"misshapen {at}.2.down_proj.weight [48, 23], expected [48, 24]",
        f"duplicated layers.1.mlp.experts.2.up_proj.weight [24, 48], also given as {UP}",
        "model.layers.2.mlp.experts.0.up_proj.weight [24, 48] holds NaN or infinities",
    ):
        assert part in str(e.value)


def test_experts_of_two_dtypes_are_an_error(checkpoint):
    expected, tensors = checkpoint
    tensors[UP] = tensors[UP].astype(np.float16)
    with pytest.raises(ValueError, match=r"experts/2/up_proj/weight holds float16"):
        assemble(tensors.items(), expected, "here")
    assemble(tensors.items(), expected, "here", jnp.float32)


def test_experts_may_be_spread_over_shards(folder, checkpoint, tmp_path):
    _, tensors = checkpoint
    shutil.copy(folder / "config.json", tmp_path)
    names = sorted(tensors)
    weight_map = {n: f"{'ab'[i % 2]}.safetensors" for i, n in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == shard}, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    ours, theirs = (load_target(f, jnp.float32).params for f in (tmp_path, folder))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# The maths


def arrays(tokens, dtype=jnp.float32):
    """Activations of one row, chosen experts, weights, and the stacks, from a fixed seed."""
    rng = np.random.default_rng(5)
    x, gate, up, down = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((D, 1, tokens), (E, F, D), (E, F, D), (E, D, F))
    )
    chosen = np.stack([rng.permutation(E)[:K] for _ in range(tokens)])[None]
    weights = jnp.asarray(rng.uniform(size=(1, tokens, K)), dtype)
    return x, jnp.asarray(chosen, jnp.int32), weights, gate, up, down


@pytest.mark.parametrize("form", ["_blocks", "_ragged"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_the_experts_are_their_definition(monkeypatch, form, tokens):
    monkeypatch.setattr(experts, "_blocks", getattr(experts, form))
    x, chosen, weights, gate, up, down = arrays(tokens)
    got = experts.expert_mlp(x, chosen, weights, gate, up, down)
    x, chosen, weights, gate, up, down = map(np.asarray, (x, chosen, weights, gate, up, down))
    for t in range(tokens):
        column, wanted = x[:, 0, t], 0.0
        for e, w in zip(chosen[0, t], weights[0, t]):
            h = gate[e] @ column
            wanted = wanted + w * (down[e] @ (h / (1 + np.exp(-h)) * (up[e] @ column)))
        np.testing.assert_allclose(got[:, 0, t], wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_token_has_the_same_bits_in_any_company(dtype):
    x, chosen, weights, *stacks = arrays(24, dtype)
    run = jax.jit(experts.expert_mlp)
    whole = run(x, chosen, weights, *stacks)
    for part in (slice(0, 1), slice(5, 9), slice(8, 24)):
        got = run(x[:, :, part], chosen[:, part], weights[:, part], *stacks)
        np.testing.assert_array_equal(got, whole[:, :, part])
    crowd = run(x, jnp.concatenate([chosen[:, :4], jnp.zeros_like(chosen[:, 4:])], 1), weights, *stacks)  # fmt: skip
    np.testing.assert_array_equal(crowd[:, :, :4], whole[:, :, :4])


@pytest.mark.parametrize("norm", [True, False])
def test_the_router_computes_in_float32_and_rounds_last(norm):
    """Two experts that bfloat16 logits could not tell apart."""
    config = dataclasses.replace(MOE, norm_topk_prob=norm)
    weight = np.zeros((E, D), np.float32)
    weight[3, :2], weight[4, 0], weight[5, 0] = (4.0, 2.0**-8), 4.0, 5.0
    x = jnp.ones((D, 1, 1), jnp.bfloat16)
    params = {"params": {"weight": jnp.asarray(weight, jnp.bfloat16)}}
    chosen, weights = Router(config, D).apply(params, x)
    assert chosen.tolist() == [[[5, 3]]]
    logits = np.array([0, 0, 0, 4 + 2.0**-8, 4, 5])
    wanted = (np.exp(logits) / np.exp(logits).sum())[[5, 3]]
    wanted = wanted / wanted.sum() if norm else wanted
    assert weights.dtype == jnp.bfloat16
    np.testing.assert_array_equal(weights[0, 0], jnp.asarray(wanted, jnp.bfloat16))


# Decoding

PROMPTS = prompts_of(2, 9)
NEW = 24


@functools.cache
def target(dtype):
    return random_target(SPARSE, dtype=jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.deep)])
def test_every_draft_gives_the_same_tokens(dtype):
    block = 4
    decoder = Decoder(target(dtype), random_draft(dtype=jnp.dtype(dtype)), block)
    state = decoder.run(PROMPTS, [NEW + 8] * 2)
    expected = [row[:NEW] for row in new_tokens(state, PROMPTS)]
    if dtype == "float32":
        plain = Decoder(target(dtype)).run(PROMPTS, [NEW] * 2)
        assert new_tokens(plain, PROMPTS) == expected
    oracle = rows_of(state)
    wrong = [[(t + 1) % VOCAB for t in row] for row in oracle]
    for rows in (oracle, wrong, [a[:5] + b[5:] for a, b in zip(oracle, wrong)]):
        state = decoder.run(PROMPTS, [NEW] * 2, script=script_of(rows))
        assert new_tokens(state, PROMPTS) == expected


def test_a_row_does_not_depend_on_the_others():
    decoder = Decoder(target("float32"))
    both = new_tokens(decoder.run(PROMPTS, [NEW] * 2), PROMPTS)
    for prompt, tokens in zip(PROMPTS, both):
        assert new_tokens(decoder.run([prompt], [NEW]), [prompt]) == [tokens]
