"""The experts of a mixture: each token passes through its own few MLPs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax import array_typing as at
from dflash_jax.ops.product import product

# Columns of one product on the CPU. Measured on a busy machine, 64 experts, 8 a token: up to 32 tokens
# 4, 8 and 16 are within two fifths of each other and none is always fastest; at 128 tokens 16 is 1.4
# times as fast as 8. With 32 columns float32 sums have other bits.
_BLOCK = 8


def expert_mlp(
    x: at.Hidden,
    chosen: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    gate: Float[Array, "E F D"],
    up: Float[Array, "E F D"],
    down: Float[Array, "E D F"],
) -> at.Hidden:
    """Sum over a token's k experts of weight times down(silu(gate x) * up x), in x's dtype.

    Pairs of a token and an expert are sorted by expert, so that an expert's weights are read for its
    own pairs only. Sums are float32.

    Source: transformers `Qwen3MoeExperts`, which rounds to x's dtype after every expert.
    """
    D, B, T = x.shape
    k = chosen.shape[-1]
    experts = chosen.reshape(-1)
    order = jnp.argsort(experts)
    columns = x.reshape(D, B * T)[:, order // k]
    form = _blocks if jax.default_backend() == "cpu" else _ragged
    y = form(columns, experts[order], gate, up, down)
    y = y[:, jnp.argsort(order)].reshape(D, B, T, k)
    return (y * weights.astype(jnp.float32)[None]).sum(axis=-1).astype(x.dtype)


def _ragged(
    x: Float[Array, "D P"],
    experts: Int[Array, " P"],
    gate: Float[Array, "E F D"],
    up: Float[Array, "E F D"],
    down: Float[Array, "E D F"],
) -> Float[Array, "D P"]:
    """`jax.lax.ragged_dot_general`, which accelerators group. On a CPU it is a dense product of every
    pair with every expert: measured with 64 experts, 10 to 80 times as slow as `_blocks`."""
    counts = jnp.bincount(experts, length=len(gate))
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])

    def grouped(rows, weight):
        return jax.lax.ragged_dot_general(
            rows, weight, counts, numbers, preferred_element_type=jnp.float32
        )

    rows = x.T
    hidden = jax.nn.silu(grouped(rows, gate)) * grouped(rows, up)
    return grouped(hidden.astype(x.dtype), down).T


def _blocks(
    x: Float[Array, "D P"],
    experts: Int[Array, " P"],
    gate: Float[Array, "E F D"],
    up: Float[Array, "E F D"],
    down: Float[Array, "E D F"],
) -> Float[Array, "D P"]:
    """Products of one expert with the next few of its pairs, one after another.

    A block has `_BLOCK` columns whatever the number of pairs, so a pair's bits do not depend on it.
    Columns behind the expert's last pair are wrong until the next block, which starts there,
    overwrites them. No gradient: the number of blocks is the data's.
    """
    D, P = x.shape
    ends = jnp.cumsum(jnp.bincount(experts, length=len(gate)))
    padded = jnp.pad(x, ((0, 0), (0, _BLOCK)))

    def block(state):
        start, out = state
        # Without the barrier XLA's CPU backend, which slices bfloat16 as float32, converts all the
        # experts before the loop: measured 40 times as slow for one token.
        *stacks, expert = jax.lax.optimization_barrier((gate, up, down, experts[start]))
        g, u, d = (stack[expert] for stack in stacks)
        columns = jax.lax.dynamic_slice_in_dim(padded, start, _BLOCK, axis=1)[:, None]
        hidden = (jax.nn.silu(product(g, columns)) * product(u, columns)).astype(x.dtype)
        out = jax.lax.dynamic_update_slice_in_dim(out, product(d, hidden)[:, 0], start, axis=1)
        return jnp.minimum(start + _BLOCK, ends[expert]), out

    out = jnp.zeros((D, P + _BLOCK), jnp.float32)
    start = jnp.zeros((), ends.dtype)
    return jax.lax.while_loop(lambda state: state[0] < P, block, (start, out))[1][:, :P]
