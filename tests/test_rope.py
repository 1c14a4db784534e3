import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import RopeConfig
from dflash_jax.ops.rope import apply_rotary_pos_emb, rope_table

HEAD_DIM = 16
POSITIONS = np.array([[0, 1, 2, 30, 31, 32, 33, 100, 255, 4095, 32768, 131072]], np.int32)
SHORT = tuple(1.0 + 0.1 * i for i in range(HEAD_DIM // 2))
LONG = tuple(1.0 + 2.0 * i for i in range(HEAD_DIM // 2))

ROPES = {
    "default": RopeConfig(theta=1e6),
    "linear": RopeConfig(theta=1e4, rope_type="linear", factor=4.0),
    "dynamic": RopeConfig(
        theta=1e4, rope_type="dynamic", factor=2.0, original_max_position_embeddings=32
    ),
    "yarn": RopeConfig(theta=1e5, rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    "yarn_mscale": RopeConfig(
        theta=1e4, rope_type="yarn", factor=8.0, original_max_position_embeddings=4096,
        beta_fast=16.0, beta_slow=2.0, mscale=0.8, mscale_all_dim=0.5, truncate=False,
    ),
    "yarn_factor": RopeConfig(
        theta=1e4, rope_type="yarn", factor=8.0, original_max_position_embeddings=256, attention_factor=1.5
    ),
    "llama3": RopeConfig(
        theta=5e5, rope_type="llama3", factor=8.0, original_max_position_embeddings=32,
        low_freq_factor=1.0, high_freq_factor=4.0,
    ),
    "longrope": RopeConfig(
        theta=1e4, rope_type="longrope", factor=4.0, original_max_position_embeddings=32,
        short_factor=SHORT, long_factor=LONG,
    ),
    "longrope_factor": RopeConfig(
        theta=1e4, rope_type="longrope", original_max_position_embeddings=32, attention_factor=1.25,
        short_factor=SHORT, long_factor=LONG,
    ),
}  # fmt: skip


def wavelengths(rope):
    return [2 * math.pi * rope.theta ** (2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]


def expected_frequency(rope: RopeConfig, i: int, position: int) -> float:
    """Dimension i's radians a position, from the papers' formulas."""
    wave = wavelengths(rope)[i]
    trained = rope.original_max_position_embeddings
    plain = 2 * math.pi / wave
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "dynamic":
        seen = max(position + 1, trained)
        base = rope.theta * (rope.factor * seen / trained - (rope.factor - 1)) ** (
            HEAD_DIM / (HEAD_DIM - 2)
        )
        return base ** (-2 * i / HEAD_DIM)
    if rope.rope_type == "yarn":
        # The dimension at which a number of turns fits into the trained length.
        at = [
            HEAD_DIM / 2 * math.log(trained / (turns * 2 * math.pi)) / math.log(rope.theta)
            for turns in (rope.beta_fast, rope.beta_slow)
        ]
        if rope.truncate:
            at = [math.floor(at[0]), math.ceil(at[1])]
        low, high = max(at[0], 0), min(at[1], HEAD_DIM - 1)
        slow = min(max((i - low) / (high - low), 0.0), 1.0)
        return plain * (1 - slow) + plain / rope.factor * slow
    if rope.rope_type == "llama3":
        if wave < trained / rope.high_freq_factor:
            return plain
        if wave > trained / rope.low_freq_factor:
            return plain / rope.factor
        smooth = (trained / wave - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        return (1 - smooth) * plain / rope.factor + smooth * plain
    if rope.rope_type == "longrope":
        return plain / (rope.long_factor if position + 1 > trained else rope.short_factor)[i]
    return plain


EXPECTED_SCALE = {
    "yarn": 0.1 * math.log(4.0) + 1,
    "yarn_mscale": (0.1 * 0.8 * math.log(8.0) + 1) / (0.1 * 0.5 * math.log(8.0) + 1),
    "yarn_factor": 1.5,
    "longrope": math.sqrt(1 + math.log(4.0) / math.log(32)),
    "longrope_factor": 1.25,
}


@pytest.mark.parametrize("name", ROPES)
def test_tables_follow_the_float64_formula(name):
    rope = ROPES[name]
    sin, cos = jax.jit(lambda p: rope_table(rope, HEAD_DIM, p))(POSITIONS)
    angle = np.array(
        [
            [expected_frequency(rope, i, p) * p for p in POSITIONS[0].tolist()]
            for i in range(HEAD_DIM // 2)
        ]
    )
    scale = EXPECTED_SCALE.get(name, 1.0)
    # float32 holds an angle of n radians to about n * 6e-8; `dynamic` also raises to a power in it.
    rtol = 4e-6 if rope.rope_type == "dynamic" else 3e-7
    tolerance = 1e-6 + scale * rtol * angle
    assert sin.dtype == cos.dtype == jnp.float32
    assert np.all(np.abs(np.asarray(sin)[:, 0] - scale * np.sin(angle)) <= tolerance)
    assert np.all(np.abs(np.asarray(cos)[:, 0] - scale * np.cos(angle)) <= tolerance)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_tokens_rotation_does_not_depend_on_the_chunk_it_came_in(name):
    positions = np.arange(20, 50, dtype=np.int32)[None]
    whole = rope_table(ROPES[name], HEAD_DIM, jnp.asarray(positions))
    for start, stop in ((0, 5), (5, 16), (16, 30)):
        part = rope_table(ROPES[name], HEAD_DIM, jnp.asarray(positions[:, start:stop]))
        for x, y in zip(whole, part):
            np.testing.assert_array_equal(x[:, :, start:stop], y)


def test_rows_have_positions_of_their_own():
    positions = jnp.asarray([[3, 4], [100, 101]], jnp.int32)
    both = rope_table(ROPES["default"], HEAD_DIM, positions)
    for b in range(2):
        row = rope_table(ROPES["default"], HEAD_DIM, positions[b : b + 1])
        np.testing.assert_array_equal(both[0][:, b], row[0][:, 0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rotation_turns_pairs_half_a_head_apart(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, HEAD_DIM, 1, 2)), dtype)
    positions = jnp.asarray([[7, 131072]], jnp.int32)
    y = apply_rotary_pos_emb(x, rope_table(ROPES["default"], HEAD_DIM, positions))
    assert y.dtype == dtype
    x64, half = np.asarray(x, np.float64), HEAD_DIM // 2
    pairs = x64[:, :half] + 1j * x64[:, half:]
    freq = 1e6 ** (-np.arange(half) / half)
    turned = pairs * np.exp(1j * freq[:, None, None] * np.asarray(positions, np.float64))
    expected = np.concatenate([turned.real, turned.imag], axis=1)
    atol = 0.02 if dtype == jnp.float32 else 0.05  # 131072 radians in float32: off by 0.008
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=atol)
    near = np.asarray(y, np.float64)[..., 0] - expected[..., 0]
    assert np.abs(near).max() < (1e-5 if dtype == jnp.float32 else 0.02)


def test_bfloat16_frequencies_or_positions_would_be_wrong():
    """The canary: what a cast would do, which the tables above must not show."""
    freq = 1e6 ** (-np.arange(0, 128, 2) / 128)
    rounded = np.asarray(jnp.asarray(freq, jnp.bfloat16), np.float64)
    assert np.abs(np.cos(freq * 255) - np.cos(rounded * 255)).max() > 0.2
    assert float(jnp.asarray(257, jnp.bfloat16)) == 256

    sin, cos = rope_table(RopeConfig(theta=1e6), 128, jnp.asarray([[255, 257]], jnp.int32))
    np.testing.assert_allclose(cos[:, 0, 0], np.cos(freq * 255), atol=3e-5)
    np.testing.assert_allclose(sin[:, 0, 1], np.sin(freq * 257), atol=3e-5)
