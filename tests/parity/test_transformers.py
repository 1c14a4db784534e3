"""Targets against transformers on the CPU, live: every RoPE scaling, both families, the embedded model."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

from dflash_jax import generate, load_target
from dflash_jax.cache import KVCache
from dflash_jax.checkpoint import gguf, keys
from dflash_jax.models.transformer import Transformer
from dflash_jax.pair import embedded_target, load_tokenizer

SHAPE = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
ROPE = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    },
}


def save_random(config, folder):
    """A random model with weights large enough that greedy decoding does not repeat one token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(4.0)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("rope_type", sorted(ROPE))
@pytest.mark.parametrize("family", [Qwen3Config, LlamaConfig])
def test_logits_and_greedy_tokens_equal_transformers(family, rope_type, tmp_path):
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, **ROPE[rope_type]}
    model = save_random(family(**SHAPE, rope_parameters=rope), tmp_path)
    target = load_target(tmp_path)
    prompt = torch.randint(2, 97, (1, 41), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(prompt, output_hidden_states=True)
    module = Transformer(target.config, (0, 1, 2))
    c = target.config
    cache = KVCache.zeros(3, 1, c.num_key_value_heads, 64, c.head_dim, jnp.float32)
    variables = {"params": target.params}
    hidden, context, _ = module.apply(variables, jnp.asarray(prompt.numpy(), jnp.int32), cache)
    logits = module.apply(variables, hidden, method="logits")
    states = torch.cat(out.hidden_states[1:], dim=-1)[0].numpy()
    np.testing.assert_allclose(context[:, 0].T, states, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(logits[:, 0].T, out.logits[0].numpy(), rtol=2e-4, atol=1e-3)
    expected = model.generate(
        prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    ours = generate(target, None, prompt.numpy(), max_new_tokens=20, stop_token_ids=())
    assert ours.tokens[0] == expected[0, 41:].tolist()


@pytest.fixture(scope="module")
def embedded():
    """The embedded GGUF as transformers reads it, and as we do."""
    path = embedded_target()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return model.eval(), tokenizer, load_target()


def test_the_embedded_gguf_has_transformers_weights(embedded):
    model, _, target = embedded
    theirs = {n: v for n, v in model.state_dict().items() if n != "lm_head.weight"}
    ours = dict(gguf.read_tensors(target.source))
    assert sorted(ours) == sorted(theirs)
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name].numpy(), err_msg=name)
    assert len(keys.flatten(target.params)) == len(ours)


# transformers does not read the file's pre-tokenizer, which sets digits apart: "  1" is another matter.
TEXTS = [
    "Hello, world!",
    "  äöü 日本語 12345\n\n\tdef f(x):  return x",
    "<|im_start|>user\nHi<|im_end|>\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_embedded_tokenizer_is_transformers(embedded, text):
    _, theirs, target = embedded
    ours = load_tokenizer(target)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_the_embedded_target_says_what_transformers_says(embedded):
    model, _, target = embedded
    tokenizer = load_tokenizer(target)
    message = [{"role": "user", "content": "Write a haiku about rivers."}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
    ours = generate(target, None, [prompt], max_new_tokens=40)
    assert ours.tokens[0] == expected[0, len(prompt) :].tolist()
