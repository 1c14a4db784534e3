"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "..."], scale: Float[Array, " X"], eps: float, axis: int = 0
) -> Float[Array, "..."]:
    """Divides `x` by its root mean square along `axis` and scales it.

    Computed in float32 and cast back once, after the scale; Hugging Face casts before the scale,
    which differs in bfloat16 only.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=axis, keepdims=True) + eps)
    shape = [1] * x.ndim
    shape[axis] = -1
    return (y * scale.astype(jnp.float32).reshape(shape)).astype(x.dtype)
