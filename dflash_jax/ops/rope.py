"""Rotary position embedding in float32, with every scaling of Hugging Face's `modeling_rope_utils`.

Positions are int32; angles, sines and cosines are float32 whatever the model's dtype: a
bfloat16 angle is already wrong in the first decimal at position 256.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dflash_jax import array_typing as at
from dflash_jax.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, positions: at.Positions) -> at.RopeTable:
    """Sines and cosines `[H/2, B, T]`, float32, times the scaling's attention factor.

    The scalings that depend on the length so far (`dynamic`, `longrope`) take it to be position + 1
    of each token, as step-by-step decoding does. So a token's rotation does not depend on the
    block or the prefill chunk that it arrived in.
    """
    freq, scale = _FREQUENCIES[rope.rope_type](
        rope, head_dim, positions[None].astype(jnp.float32) + 1.0
    )
    freq = jnp.asarray(freq, jnp.float32)
    freq = freq[:, None, None] if freq.ndim == 1 else freq
    angle = freq * positions[None].astype(jnp.float32)
    # As a loop of two steps, whose result XLA does not fuse into its readers: it would compute it
    # again for every layer and head (measured: 7 of 208 ms of a round of 8 rows).
    table = jax.lax.map(
        lambda cosine: jnp.where(cosine, jnp.cos(angle), jnp.sin(angle)), np.array([False, True])
    )
    return table[0] * scale, table[1] * scale


def apply_rotary_pos_emb(
    x: Float[Array, "N H B T"], table: at.RopeTable
) -> Float[Array, "N H B T"]:
    """Rotates `x` in the half-split ("neox") layout; float32 inside, x's dtype outside.

    Source: dflash 0.1.0 and transformers, `apply_rotary_pos_emb`.
    """
    sin, cos = (t[None] for t in table)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=1).astype(x.dtype)


def _inverse(theta: float, head_dim: int) -> np.ndarray:
    """theta^(-2i/H), i = 0..H/2-1, in float64."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _default(rope: RopeConfig, head_dim: int, seen: Float[Array, "1 B T"]):
    return _inverse(rope.theta, head_dim), 1.0


def _linear(rope: RopeConfig, head_dim: int, seen: Float[Array, "1 B T"]):
    return _inverse(rope.theta, head_dim) / rope.factor, 1.0


def _dynamic(rope: RopeConfig, head_dim: int, seen: Float[Array, "1 B T"]):
    """NTK scaling: the base grows with the length once it passes the trained one."""
    trained = float(rope.original_max_position_embeddings)
    ratio = rope.factor * jnp.maximum(seen, trained) / trained - (rope.factor - 1)
    theta = rope.theta * ratio ** (head_dim / (head_dim - 2))
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32)[:, None, None] / head_dim
    return theta**-exponent, 1.0


def _yarn(rope: RopeConfig, head_dim: int, seen: Float[Array, "1 B T"]):
    """Interpolates slow dimensions, keeps fast ones, blends between (arXiv 2309.00071)."""

    def dimension(rotations: float) -> float:
        trained = rope.original_max_position_embeddings
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / (max(high - low, 1e-3)), 0, 1)
    freq = _inverse(rope.theta, head_dim)
    freq = freq / rope.factor * ramp + freq * (1 - ramp)
    return freq, _yarn_attention(rope)


def _yarn_attention(rope: RopeConfig) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _llama3(rope: RopeConfig, head_dim: int, seen: Float[Array, "1 B T"]):
    """Llama 3.1: divides low frequencies by the factor and blends the middle band."""
    freq = _inverse(rope.theta, head_dim)
    rotations = rope.original_max_position_embeddings * freq / (2 * math.pi)
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0, 1)
    return freq / rope.factor * (1 - blend) + freq * blend, 1.0


def _longrope(rope: RopeConfig, head_dim: int, seen: Float[Array, "1 B T"]):
    """Per-dimension factors, a short list and a long one (arXiv 2402.13753)."""
    trained = rope.original_max_position_embeddings
    freq = _inverse(rope.theta, head_dim)
    short, long = (
        jnp.asarray(freq / np.array(f), jnp.float32)[:, None, None]
        for f in (rope.short_factor, rope.long_factor)
    )
    scale = rope.attention_factor
    if scale is None:
        scale = (
            1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(trained))
        )
    return jnp.where(seen > trained, long, short), scale


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
