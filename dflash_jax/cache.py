"""A fixed-size key/value cache that is rewound by shortening it."""

import functools
from collections.abc import Sequence
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from dflash_jax import array_typing as at

KeysValues = Sequence[tuple[at.KeyValues, at.KeyValues]]


@no_type_check  # JAX rebuilds it around shapes and shardings too
class KVCache(struct.PyTreeNode):
    """Keys and values of every layer; slot and absolute position are the same number, unless it is a ring.

    A ring stops growing at `ring` slots; from then on position p stands in slot `p % ring`, over the
    one that left the window. It must have room for the window and one write.

    Models write rows at slots `[length, length + T)` and leave `length` alone: the decoder commits
    rows by lengthening the cache and rejects them by not doing so. Slots at or past `length` hold
    garbage that masks hide and that the next write covers, so a rewind copies nothing.

    Attributes:
        k: Rotated keys, `[B, K, S, H]` a layer.
        v: Values, `[B, K, S, H]` a layer.
        length: Live positions of each row, int32 `[B]`.
        ring: Slots of a full ring; None if the cache holds every position.
    """

    k: tuple[Float[Array, "B K S H"], ...]
    v: tuple[Float[Array, "B K S H"], ...]
    length: at.Rows
    ring: int | None = struct.field(pytree_node=False, default=None)

    @property
    def size(self) -> int:
        return self.k[0].shape[2]

    @classmethod
    def zeros(
        cls,
        layers: int,
        batch: int,
        heads: int,
        size: int,
        width: int,
        dtype: DTypeLike,
        ring: int | None = None,
    ) -> "KVCache":
        """An empty cache of `size` slots, or of `ring` if those are fewer."""
        slots = size if ring is None else min(size, ring)

        def empty():
            return tuple(jnp.zeros((batch, heads, slots, width), dtype) for _ in range(layers))

        return cls(empty(), empty(), jnp.zeros((batch,), jnp.int32), ring)

    def resize(self, size: int) -> "KVCache":
        """The same content with `size` slots, more than any row's length; one copy.

        A ring has at most its own size, and is left alone there.
        """
        size = size if self.ring is None else min(size, self.ring)
        if size == self.size:
            return self
        return self.replace(k=resize(self.k, size, axis=2), v=resize(self.v, size, axis=2))

    def held(self, count: int) -> Int[Array, "B S"]:
        """Position that each slot holds once `[length, length + count)` are written; negative for none."""
        slot = jnp.arange(self.size, dtype=jnp.int32)[None]
        newest = (self.length + (count - 1))[:, None]
        return newest - (newest - slot) % self.size

    def written(self, rows: KeysValues) -> "KVCache":
        """The cache with every layer's `rows` at positions `[length, length + T)`; the length stays."""
        k, v = zip(*(self.write(i, *pair) for i, pair in enumerate(rows)))
        return self.replace(k=k, v=v)

    def write(
        self, layer: int, k: Float[Array, "B K T H"], v: Float[Array, "B K T H"]
    ) -> tuple[at.KeyValues, at.KeyValues]:
        """A layer's buffers with rows at positions `[length, length + T)`."""
        put = write_keys_values if self.ring is None else write_ring
        return put(self.k[layer], k, self.length), put(self.v[layer], v, self.length)


def resize(tree, size: int, axis: int):
    """Cuts `axis` of every array of `tree` to `size`, or pads it with zeros up to it."""

    def fit(x):
        x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, widths)

    return jax.tree.map(fit, tree)


def write_keys_values(
    buffer: at.KeyValues, rows: Float[Array, "B K T H"], start: at.Rows
) -> Float[Array, "B K S H"]:
    """Writes a layer's new keys or values `[B, K, T, H]` into slots `[start, start + T)` of each row.

    One token is written twice, the second time into the scratch slot behind it: XLA's CPU backend
    fuses an update of a single slot into its reader, and then copies the whole buffer every round.
    So a row needs two free slots even for one token.
    """
    if rows.shape[2] == 1 < buffer.shape[2]:
        rows = jnp.concatenate([rows, rows], axis=2)
    return write_rows(buffer, rows, start, axis=2)


def write_ring(
    buffer: at.KeyValues, rows: Float[Array, "B K T H"], start: at.Rows
) -> Float[Array, "B K S H"]:
    """`write_keys_values` at positions `[start, start + T)` of a ring: position p goes to slot `p % S`."""
    if rows.shape[2] == 1 < buffer.shape[2]:
        rows = jnp.concatenate([rows, rows], axis=2)
    T, S = rows.shape[2], buffer.shape[2]
    if T > S:
        raise ValueError(f"{T} rows do not fit into a ring of {S} slots")
    slots = (start[:, None] + jnp.arange(T, dtype=start.dtype)[None]) % S
    rows = rows.astype(buffer.dtype)
    if len(buffer) == 1:
        return buffer.at[:, :, slots[0]].set(rows, unique_indices=True)
    put = jax.vmap(lambda b, r, s: b.at[:, s].set(r, unique_indices=True))
    return put(buffer, rows, slots)


def write_rows(
    buffer: Shaped[Array, " B *any"], rows: Shaped[Array, " B *new"], start: at.Rows, axis: int
) -> Shaped[Array, " B *any"]:
    """Writes `rows[b]` into `buffer[b]` from `start[b]` on along `axis` (which counts the batch axis).

    The caller guarantees room: an update past the end would be shifted down onto live slots
    without a word.
    """
    rows = rows.astype(buffer.dtype)
    zero = jnp.zeros((), start.dtype)

    def update(b, r, s, axis):
        return jax.lax.dynamic_update_slice(b, r, [s if i == axis else zero for i in range(b.ndim)])

    if len(buffer) == 1:  # no vmap, which would make it a scatter
        return update(buffer, rows, start[0], axis)
    return jax.vmap(functools.partial(update, axis=axis - 1))(buffer, rows, start)


def read_rows(
    buffer: Shaped[Array, "B S"], start: at.Rows, count: int
) -> Shaped[Array, "B {count}"]:
    """`buffer[b, start[b] : start[b] + count]` of every row."""
    return jax.vmap(lambda b, s: jax.lax.dynamic_slice_in_dim(b, s, count))(buffer, start)
