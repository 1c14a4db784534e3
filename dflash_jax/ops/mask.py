"""Who sees whom: boolean masks `[B, S, T]`, true where cache slot s is visible to query t.

A target's cache slot and the absolute position that it holds are the same number; a draft's ring
says which position each slot holds.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax import array_typing as at
from dflash_jax.config import WindowRule


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


def draft_visible(
    slot: Int[Array, "..."],
    key: Int[Array, "..."],
    window: int | None,
    causal: bool,
    rule: WindowRule,
) -> Bool[Array, "..."]:
    """Whether a block's slot sees a key of the context (`key < 0`) or of its own block.

    A full layer's slot sees the whole context. A sliding layer's sees

    - `zlab`, `nemo`, `specforge`: the context less than `window` behind the slot itself;
    - `speculators`: the `window` positions before the anchor, whatever the slot.

    In the block all is visible, or with `causal` what is not behind the slot; under `zlab` a sliding
    layer also cuts there what is `window` or more away, on either side.

    Args:
        slot: 0..Q-1, broadcast against `key`.
        key: Position relative to the anchor.
        window: None for a full layer.
        causal: Whether the layer is causal inside the block.
        rule: Named after the trainer.

    Source: dflash 0.1.0 `model.py`; NeMo Automodel `dflash_mask.py`; specforge 0.2.0
    `dflash_family_model.py`; speculators 0.9.0 `models/dflash/attention.py`.
    """
    context = key < 0
    visible = context | (key <= slot) if causal else jnp.broadcast_to(True, key.shape)
    if window is None:
        return visible
    near = key >= -window if rule == "speculators" else slot - key < window
    if rule == "zlab":
        return visible & near & (key - slot < window)
    return visible & (near | ~context)


def draft_mask(
    length: at.Rows,
    held: Int[Array, "B S"],
    block_size: int,
    window: int | None = None,
    causal: bool = False,
    rule: WindowRule = "zlab",
) -> at.Mask:
    """What a block at positions `[length, length + Q)` sees of a cache that holds its context and itself.

    Args:
        length: The anchor's position, which is the context's length.
        held: Position that each slot holds; negative for none.
        window, causal, rule: See `draft_visible`.
    """
    key = (held - length[:, None])[:, :, None]
    slot = jnp.arange(block_size, dtype=key.dtype)[None, None]
    live = (held >= 0)[:, :, None] & (key < block_size)
    visible = live & draft_visible(slot, key, window, causal, rule)
    return jnp.broadcast_to(visible, (*held.shape, block_size))


def block_masks(
    anchors: Int[Array, "B A"],
    size: int,
    block_size: int,
    window: int | None = None,
    causal: bool = False,
    rule: WindowRule = "zlab",
    documents: Int[Array, "B S"] | None = None,
) -> tuple[Bool[Array, "B S A X"], Bool[Array, "Q Q"]]:
    """`draft_mask` of many blocks of one sequence: what each sees of the context, and of its own block.

    Args:
        anchors: Index of each block's anchor in its row.
        size: Context positions, 0..S-1.
        block_size: Q.
        window, causal, rule: See `draft_visible`.
        documents: Of a packed row, the document of each position, negative for padding: the context
            is the anchor's document's. None where a row is one document.

    Returns:
        `[B, S, A, Q]`, or `[B, S, A, 1]` where all slots see the same; and `[Q, Q]`, keys first.
    """
    position = jnp.arange(size, dtype=anchors.dtype)
    key = position[None, :, None, None] - anchors[:, None, :, None]
    slot = jnp.arange(block_size, dtype=anchors.dtype)
    before = key < 0
    far = before & draft_visible(slot[None, None, None], key, window, causal, rule)
    if documents is not None:
        own = jnp.take_along_axis(documents, anchors, axis=1)[:, None]
        same = (documents[:, :, None] == own) & (own >= 0)
        far = far & same[..., None]
    near = draft_visible(slot[None], slot[:, None], window, causal, rule)
    return far, jnp.broadcast_to(near, (block_size, block_size))


def document_positions(documents: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Positions that begin at 0 in each document of a packed row; a document lies in one piece."""
    index = jnp.arange(documents.shape[1], dtype=jnp.int32)[None]
    begins = jnp.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
