"""Who sees whom: boolean masks `[B, S, T]`, true where cache slot s is visible to query t.

Slot and absolute position are the same number, so a mask compares slots with positions.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_jax import array_typing as at


def causal_mask(positions: at.Positions, size: int, window: int | None = None) -> at.Mask:
    """Each query sees the slots up to its own position, or the newest `window` of them.

    For positions [[2, 3]], size 5 and window 2 (one row a slot):

        s=0  . .
        s=1  x .
        s=2  x x
        s=3  . x
        s=4  . .
    """
    slot = jnp.arange(size)[None, :, None]
    position = positions[:, None, :]
    visible = slot <= position
    return visible if window is None else visible & (position - slot < window)


def block_mask(length: Int[Array, " B"], block_size: int, size: int) -> at.Mask:
    """Every slot of a draft's block sees the context [0, length) and the whole block behind it.

    Source: arXiv 2602.06036, section 3; `is_causal` absent on full layers in dflash 0.1.0.
    """
    visible = jnp.arange(size)[None, :] < (length + block_size)[:, None]
    return jnp.broadcast_to(visible[:, :, None], (*visible.shape, block_size))
