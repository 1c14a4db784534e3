"""A tiny target that answers, and its answers as training examples."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from fakes import TARGET, prompts_of, random_params

from dflash_jax.cache import KVCache
from dflash_jax.config import RopeConfig
from dflash_jax.generation import generate
from dflash_jax.models.transformer import Transformer
from dflash_jax.pair import Target
from train.store import Example

TAPS = (0, 2)
# Drafts are trained in the target's shape.
CONFIG = dataclasses.replace(TARGET, rope=RopeConfig(theta=1e4), max_position_embeddings=128)
STOP = 13


def tiny_target(seed: int = 0) -> Target:
    return Target(CONFIG, random_params(CONFIG, seed), (STOP,), source=Path("tiny"))


def taps_of(target: Target, tokens, ids=TAPS) -> np.ndarray:
    """Taps `[T, C * D]` of one plain forward over the whole sequence."""
    c = target.config
    size = c.max_position_embeddings  # padded behind, for one compilation
    padded = np.zeros((1, size), np.int32)
    padded[0, : len(tokens)] = tokens
    cache = KVCache.zeros(
        c.num_hidden_layers, 1, c.num_key_value_heads, size, c.head_dim, jnp.float32
    )
    _, context, _ = _apply(Transformer(c, tuple(ids)), {"params": target.params}, padded, cache)
    return np.asarray(context[:, 0, : len(tokens)].T)


_apply = jax.jit(Transformer.apply, static_argnums=0)


def answers(target: Target, prompts, max_new_tokens: int, ids=TAPS) -> list[Example]:
    """Examples of the target's own greedy answers, made without `train.regenerate`."""
    out = []
    for i, prompt in enumerate(prompts):
        new = generate(target, None, [prompt], max_new_tokens=max_new_tokens).tokens[0]
        tokens = np.array([*prompt, *new], np.int32)
        features = taps_of(target, tokens, ids).copy()
        features[-1] = 0
        out.append(Example.response(f"p{i}", "chat", tokens, len(prompt), features))
    return out


def tiny_answers(count: int = 4, max_new_tokens: int = 20, ids=TAPS) -> list[Example]:
    lengths = [3 + (5 * i) % 11 for i in range(count)]
    return answers(tiny_target(), prompts_of(*lengths), max_new_tokens, ids)
