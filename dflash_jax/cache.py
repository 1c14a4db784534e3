"""A fixed-size key/value cache that is rewound by shortening it."""

import functools
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from dflash_jax import array_typing as at


@no_type_check  # JAX rebuilds it around shapes and shardings too
class KVCache(struct.PyTreeNode):
    """Keys and values of every layer; slot and absolute position are the same number.

    Models write rows at slots `[length, length + T)` and leave `length` alone: the decoder commits
    rows by lengthening the cache and rejects them by not doing so. Slots at or past `length` hold
    garbage that masks hide and that the next write covers, so a rewind copies nothing.

    Attributes:
        k: Rotated keys, `[B, K, S, H]` a layer.
        v: Values, `[B, K, S, H]` a layer.
        length: Live slots of each row, int32 `[B]`.
    """

    k: tuple[Float[Array, "B K S H"], ...]
    v: tuple[Float[Array, "B K S H"], ...]
    length: at.Rows

    @property
    def size(self) -> int:
        return self.k[0].shape[2]

    @classmethod
    def zeros(
        cls, layers: int, batch: int, heads: int, size: int, width: int, dtype: DTypeLike
    ) -> "KVCache":
        def empty():
            return tuple(jnp.zeros((batch, heads, size, width), dtype) for _ in range(layers))

        return cls(empty(), empty(), jnp.zeros((batch,), jnp.int32))

    def grow(self, size: int) -> "KVCache":
        """The same content with `size` slots; one copy."""
        return self.replace(k=grow(self.k, size, axis=2), v=grow(self.v, size, axis=2))


def grow(tree, size: int, axis: int):
    """Pads `axis` of every array of `tree` with zeros up to `size`."""

    def pad(x):
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, widths)

    return jax.tree.map(pad, tree)


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
