"""Which proposals the target keeps. Pure; knows no model."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def num_accepted(drafted: Int[Array, "B P"], predicted: Int[Array, "B Q"]) -> Int[Array, " B"]:
    """Length, 0..P, of the longest drafted prefix that equals the target's own choices.

    Args:
        drafted: Proposals for block slots 1..Q-1.
        predicted: The target's choice after each block slot; `predicted[:, k]` follows slot k, so it
            is compared with `drafted[:, k]`.

    Source: greedy verification in dflash 0.1.0 `dflash_generate`.
    """
    return jnp.cumprod(drafted == predicted[:, :-1], axis=1, dtype=jnp.int32).sum(
        axis=1, dtype=jnp.int32
    )
