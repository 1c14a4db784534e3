"""A fixed-size key/value cache that is rewound by shortening it."""

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


def write_rows(
    buffer: Shaped[Array, " B *any"], rows: Shaped[Array, " B *new"], start: at.Rows, axis: int
) -> Shaped[Array, " B *any"]:
    """Writes `rows[b]` into `buffer[b]` from `start[b]` on along `axis` (which counts the batch axis).

    The caller guarantees room: an update past the end would be shifted down onto live slots
    without a word.
    """
    rows = rows.astype(buffer.dtype)
    zero = jnp.zeros((), start.dtype)

    def at_row(b, r, s):
        return jax.lax.dynamic_update_slice(
            b, r, [s if i == axis - 1 else zero for i in range(b.ndim)]
        )

    if buffer.shape[0] == 1:  # without vmap it stays a dynamic_update_slice, no scatter
        return at_row(buffer[0], rows[0], start[0])[None]
    return jax.vmap(at_row)(buffer, rows, start)


def read_rows(
    buffer: Shaped[Array, "B S"], start: at.Rows, count: int
) -> Shaped[Array, "B {count}"]:
    """`buffer[b, start[b] : start[b] + count]` of every row."""
    return jax.vmap(lambda b, s: jax.lax.dynamic_slice_in_dim(b, s, count))(buffer, start)
