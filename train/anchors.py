"""Which positions of a training sequence start a block, and what its slots predict."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# An anchor is a supervised token with at least one supervised token behind it. Blocks may hang over
# the end of a response: their slots past it carry no label, so short responses train too (NeMo wants
# whole blocks and leaves the last Q - 1 tokens of a row without an anchor).


def sample_anchors(
    key: jax.Array,
    supervised: Bool[Array, "B S"],
    count: int,
    documents: Int[Array, "B S"] | None = None,
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Draws up to `count` distinct anchors a row, uniformly, in ascending order.

    Args:
        key: Consumed.
        supervised: Tokens of the response.
        count: A, of a row, not of a document: a packed row's share it, each in proportion to its legal anchors.
        documents: Of a packed row, the document of each position, negative for padding: an anchor's
            successor is of its own. None where a row is one document.

    Returns:
        See `choose_anchors`.
    """
    return choose_anchors(jax.random.uniform(key, supervised.shape), supervised, count, documents)


def choose_anchors(
    noise: Float[Array, "B S"],
    supervised: Bool[Array, "B S"],
    count: int,
    documents: Int[Array, "B S"] | None = None,
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """The up to `count` legal anchors a row with most noise, in ascending order.

    Args:
        noise: Of each position, in [0, 1).
        supervised, count, documents: See `sample_anchors`.

    Returns:
        Positions, and which of them are real; a row with fewer than A legal anchors pads with
        position 0.

    Source: uniform without replacement as in speculators 0.9.0 `models/dflash/utils.py`; legality as
    in specforge 0.2.0 (both the anchor and its successor are supervised).
    """
    follows = jnp.pad(supervised[:, 1:], ((0, 0), (0, 1)))
    legal = supervised & follows
    if documents is not None:
        same = documents[:, 1:] == documents[:, :-1]
        legal = legal & jnp.pad(same, ((0, 0), (0, 1))) & (documents >= 0)
    priority = jnp.where(legal, noise, -1.0)
    S = legal.shape[1]
    best, position = jax.lax.top_k(priority, min(count, S))
    # Unreal ones sort to the end.
    position = jnp.sort(jnp.where(best >= 0, position, S), axis=1)
    position = jnp.pad(position, ((0, 0), (0, count - position.shape[1])), constant_values=S)
    real = position < S
    return jnp.where(real, position, 0).astype(jnp.int32), real


def sample_first_slots(
    key: jax.Array, shape: tuple[int, ...], block_size: int, base: float
) -> Int[Array, "B A"]:
    """Draws for each block the slot that is predicted first; the tokens before it are visible.

    Slot l of [2, Q - 1], or 1 where a block has no slot 2, has a probability in proportion to `base`^l.

    Source: NeMo Automodel `components/speculative/dflash/core.py` (D2SD, arXiv 2606.04446; base 0.9).
    """
    slots = jnp.arange(min(2, block_size - 1), block_size, dtype=jnp.int32)
    return slots[jax.random.categorical(key, slots * jnp.log(base), shape=shape)]


def block_labels(
    tokens: Int[Array, "B S"],
    supervised: Bool[Array, "B S"],
    anchors: Int[Array, "B A"],
    real: Bool[Array, "B A"],
    block_size: int,
    documents: Int[Array, "B S"] | None = None,
    first_slot: int = 1,
) -> tuple[Int[Array, "B A Q"], Bool[Array, "B A Q"]]:
    """Slot k's label, the token at anchor + k, and whether it counts.

    Slot 0 is the anchor itself and never counts, unless it is the `first_slot` that predicts: then slot
    k's label is the token at anchor + k + 1. A slot counts while its token is in the row and
    supervised, and its block's anchor is real. In a packed row it must be of the anchor's document too,
    so a block that hangs over the end trains the slots before it (speculators teaches such a block the
    next document's tokens, NeMo leaves it out). Decoding reads the slots as the same
    tokens: in SpecForge's DSpark the two are one slot apart.
    """
    B, S = tokens.shape
    slot = jnp.arange(block_size, dtype=anchors.dtype)[None, None]
    position = anchors[:, :, None] + slot + (1 - first_slot)
    inside = position < S
    flat = jnp.minimum(position, S - 1).reshape(B, -1)
    labels = jnp.take_along_axis(tokens, flat, axis=1).reshape(position.shape)
    counts = jnp.take_along_axis(supervised, flat, axis=1).reshape(position.shape)
    counts = counts & inside & real[:, :, None] & (slot >= first_slot)
    if documents is not None:
        of = jnp.take_along_axis(documents, flat, axis=1).reshape(position.shape)
        own = jnp.take_along_axis(documents, anchors, axis=1)
        counts = counts & (of == own[:, :, None])
    return labels, counts
