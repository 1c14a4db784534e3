"""Weight-only quantisation of targets: every matrix as int8 with a scale a row, made as it is read.

Norms and biases stay as they are. Parameters keep their paths; a matrix's `scale` is beside its `weight`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

from dflash_jax.checkpoint import keys
from dflash_jax.config import TargetConfig

METHODS = ("int8",)
_LARGEST = 127


def check(method: str | None, config: TargetConfig | None = None) -> None:
    """Raises ValueError for an unknown method, or for a target that it is not for."""
    if method is not None and method not in METHODS:
        raise ValueError(f"quantize={method!r} must be None or one of {', '.join(METHODS)}")
    if method is not None and config is not None and config.moe is not None:
        experts = config.moe.num_experts
        raise ValueError(f"quantize={method!r} is for dense targets, not for {experts} experts")


def quantize(
    weight: Float[Array, "F D"], dtype: DTypeLike
) -> tuple[Int8[Array, "F D"], Float[Array, " F"]]:
    """Integers in [-127, 127], and each row's scale in `dtype`; `|weight - integers * scale| <= scale / 2`.

    The integers are of the scale as it was rounded, so bfloat16 keeps the bound: 127 times its
    rounding error is less than half a step.
    """
    weight = weight.astype(jnp.float32)
    scale = (jnp.max(jnp.abs(weight), axis=1) / _LARGEST).astype(dtype)
    step = jnp.where(scale == 0, 1, scale).astype(jnp.float32)  # a row of zeros stays one
    return jnp.round(weight / step[:, None]).astype(jnp.int8), scale


def stream(
    leaves: Iterable[tuple[str, Any]],
    dtype: DTypeLike | None = None,
    placement: keys.Placement = None,
) -> Iterator[tuple[str, Any]]:
    """Yields a dense target's pairs (path, leaf), quantised, one matrix held at a time.

    Args:
        leaves: In the dtypes that they are stored in. Numpy arrays give numpy arrays, quantised on the
            first device; JAX's stay where they are.
        dtype: Of all but the integers; None keeps each leaf's own.
        placement: Of JAX's leaves, here for the scales.
    """
    for path, leaf in leaves:
        kept = jnp.dtype(leaf.dtype if dtype is None else dtype)
        if leaf.ndim == 1:
            yield path, leaf.astype(kept)
            continue
        both = path, scale_of(path)
        if isinstance(leaf, np.ndarray):
            values = map(np.asarray, _quantize(leaf, kept))
        else:
            places = leaf.sharding, keys.sharding_of(both[1], leaf.shape[:1], placement)
            values = _quantize(leaf, kept, places)
        del leaf  # not held while the next is read
        yield from zip(both, values)


def _quantize(leaf: Any, dtype: np.dtype, places: Any = None) -> Any:
    return jax.jit(quantize, static_argnums=1, out_shardings=places)(leaf, dtype)


def scale_of(path: str) -> str:
    """The path of a matrix's scale."""
    return path.removesuffix("weight") + "scale"


def paths(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The paths of a quantised target, of those and the shapes of its parameters."""
    own = ((path, scale_of(path)) if len(shape) == 2 else (path,) for path, shape in shapes.items())
    return [path for pair in own for path in pair]
