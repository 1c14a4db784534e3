"""The one matrix product of weights and activations, and that of quantised weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Weights that the CPU converts at once. Larger matrices go by parts of 2^18: 2^16 and 2^17 are slower in a
# loop of an embedded target's matrices, float32 and bfloat16, 1 to 8 columns, 2^19 no faster.
_WHOLE, _PART = 2**20, 2**18


@jax.custom_vjp
def product(weight: Float[Array, "F D"], x: Float[Array, "D B T"]) -> Float[Array, "F B T"]:
    """W x in float32, summed in float32, of operands in the weight's dtype.

    Asking for float32 lets a CPU with bfloat16 units use them: measured with AMX, 5 times as fast as
    a bfloat16 result, which XLA computes in float32. A single bfloat16 column gets a second one there:
    XLA has no such product with a vector and would convert the whole matrix, 9 times as slow. Fewer than 16
    float32 columns a row are filled up to a power of two, if all rows have more than 4: of an embedded target's
    layers and head, 7 columns take 1.24 and 1.30 of the time of 8, and 9 take 1.37 and 1.15 of that of 16 (AVX-512).

    The gradient is the same kind of product twice: JAX's own would multiply a float32 cotangent with
    a bfloat16 operand, which XLA computes in float32 as well.
    """
    _, B, T = x.shape
    more = _filled(B, T, weight.dtype) - T if jax.default_backend() == "cpu" else 0
    columns = jnp.pad(x.astype(weight.dtype), ((0, 0), (0, 0), (0, more)))
    return _einsum("FD,DBT->FBT", weight, columns)[:, :, :T]


def _filled(B: int, T: int, dtype: jnp.dtype) -> int:
    """Columns of each of B rows that the CPU is given instead of T; see `product`."""
    if dtype == jnp.bfloat16:
        return 2 if B * T == 1 else T
    return 1 << (T - 1).bit_length() if B * T > 4 and T < 16 else T


def _einsum(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _forward(weight, x):
    return product(weight, x), (weight, x)


def _backward(operands, cotangent):
    weight, x = operands
    # Columns in one axis: XLA's CPU backend has no bfloat16 product that sums over two.
    columns = x.astype(weight.dtype).reshape(len(x), -1)
    g = cotangent.astype(weight.dtype).reshape(len(cotangent), -1)
    by_weight = _einsum("FR,DR->FD", g, columns).astype(weight.dtype)
    return by_weight, _einsum("FD,FR->DR", weight, g).astype(x.dtype).reshape(x.shape)


product.defvjp(_forward, _backward)


def quantized_product(
    weight: Int[Array, "F D"], scale: Float[Array, " F"], x: Float[Array, "D B T"]
) -> Float[Array, "F B T"]:
    """`scale` W x in float32, summed in float32, of a matrix of integers, which stays one in memory.

    The product is of operands in x's dtype, in which integers of eight bits are exact. A row's scale
    commutes with the row's sum, so it is applied to the result.
    """
    form = _on_cpu if jax.default_backend() == "cpu" else _converted
    return form(weight, x) * scale.astype(jnp.float32)[:, None, None]


def _converted(weight: Int[Array, "F D"], x: Float[Array, "D B T"]) -> Float[Array, "F B T"]:
    """The conversion is left to XLA, which fuses it into the product on accelerators."""
    return product(weight.astype(x.dtype), x)


@jax.jit  # traced and lowered once for all matrices of a shape
def _on_cpu(weight: Int[Array, "F D"], x: Float[Array, "D B T"]) -> Float[Array, "F B T"]:
    """XLA's CPU backend converts a whole matrix before it multiplies, and before the loop around it if there
    is one, so that a float32 copy of all weights would be held and read."""
    columns = x.reshape(len(x), 1, -1)
    if weight.size > _WHOLE:
        y = _by_parts(weight, columns)
    else:
        # 0, or 1 where x is not a number: of the loop's own values, so the conversion stays inside it; out of
        # an optimization barrier XLA hoists it. Measured: an embedded target's decode loop then compiles as
        # fast as float32's, with a loop a matrix half as long again, for the same time a step.
        zero = (x[0, 0, 0] != x[0, 0, 0]).astype(weight.dtype)
        y = _converted(weight + zero, columns)
    return y.reshape(len(weight), *x.shape[1:])


def _by_parts(weight: Int[Array, "F D"], x: Float[Array, "D B T"]) -> Float[Array, "F B T"]:
    """Some rows after others, in a loop, from which nothing is hoisted; the last ones may be multiplied twice."""
    F, D = weight.shape
    # Two parts at least: XLA would unroll a loop of one, and hoist its conversion.
    rows = max(1, min(_PART // D, F // 2))

    def part(i: Array, out: Array) -> Array:
        start = jnp.minimum(i * rows, F - rows)
        few = jax.lax.dynamic_slice_in_dim(weight, start, rows)
        return jax.lax.dynamic_update_slice_in_dim(out, _converted(few, x), start, axis=0)

    out = jnp.zeros((F, *x.shape[1:]), jnp.float32)
    return jax.lax.fori_loop(0, -(-F // rows), part, out)
