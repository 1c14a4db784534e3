"""Targets that we write, loaded by transformers on the CPU; and multimodal ones of its own, read here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from dflash_jax.cache import KVCache
from dflash_jax.checkpoint.export import save_target
from dflash_jax.models.transformer import Transformer
from dflash_jax.pair import read_target

IDS = np.random.default_rng(0).integers(2, 90, (1, 21))
TARGETS = ["llama3", "qwen3_bias_yarn", "qwen3_moe", "qwen3_sliding", "qwen3_tied", "qwen3_v4rope"]


def logits(target):
    c = target.config
    cache = KVCache.zeros(c.num_hidden_layers, 1, c.num_key_value_heads, 32, c.head_dim, jnp.float32)  # fmt: skip
    module, variables = Transformer(c), {"params": target.params}

    @jax.jit
    def run(variables, ids, cache):
        return module.apply(variables, module.apply(variables, ids, cache)[0], method="logits")

    return np.asarray(run(variables, jnp.asarray(IDS, jnp.int32), cache))[:, 0].T


def their_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(IDS)).logits[0].numpy()


@pytest.mark.parametrize("name", TARGETS)
def test_transformers_loads_our_export_with_the_originals_logits(name, golden, tmp_path):
    source = golden / "targets" / name
    target = read_target(source)
    save_target(
        tmp_path / "ours", target.config, target.params, stop_token_ids=(1, 7), pad_token_id=3
    )
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    exported, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    assert exported.dtype == torch.float32
    assert exported.generation_config.eos_token_id == [1, 7]
    np.testing.assert_array_equal(their_logits(exported.eval()), their_logits(original))


TEXT = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2], "mrope_interleaved": True}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48,
          "deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
CLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}  # fmt: skip
WRAPPERS = {
    "qwen3_vl": lambda: Qwen3VLConfig(text_config={**TEXT, "rope_parameters": MROPE}, vision_config=VISION),
    "qwen3_vl_moe": lambda: Qwen3VLMoeConfig(text_config={**TEXT, **MIXTURE, "rope_parameters": MROPE}, vision_config=VISION),
    "llava": lambda: LlavaConfig(text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**CLIP)),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(WRAPPERS))
def test_a_multimodal_targets_text_has_transformers_logits(kind, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(WRAPPERS[kind](), dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0) if p.ndim > 1 else None
    model.save_pretrained(tmp_path)
    target = read_target(tmp_path)
    np.testing.assert_allclose(logits(target), their_logits(model), rtol=2e-4, atol=1e-3)
