"""A reduced vocabulary: the ids that a draft can propose, and its labels."""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


def frequent_vocabulary(
    counts: Int[np.ndarray, " V"], size: int, always: Sequence[int] = ()
) -> Int[np.ndarray, " Vd"]:
    """The `size` most frequent ids, ascending; ties go to the smaller id.

    Args:
        counts: Of each id in the responses.
        size: Ids to keep.
        always: Ids that are among them whatever their counts, the stop ids.

    Raises:
        ValueError: If `size` is not in [1, V), leaves no room for `always`, or one of those is no id.
    """
    V = len(counts)
    always = sorted(set(always))
    if any(not 0 <= i < V for i in always):
        raise ValueError(f"{always=} must be ids in [0, {V})")
    if not max(len(always), 1) <= size < V:
        raise ValueError(f"{size=} must be in [{max(len(always), 1)}, {V})")
    ranked = np.asarray(counts, np.int64).copy()
    ranked[always] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-ranked, kind="stable")[:size]).astype(np.int32)


def count_tokens(responses: Iterable[np.ndarray], vocab_size: int) -> Int[np.ndarray, " V"]:
    """How often each id occurs in the responses, the prompts left out."""
    counts = np.zeros(vocab_size, np.int64)
    for tokens in responses:
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def offsets(ids: Int[np.ndarray, " Vd"]) -> Int[np.ndarray, " Vd"]:
    """Ascending ids as a checkpoint has them, `d2t`: the target's id of draft id i is `i + d2t[i]`."""
    return (ids - np.arange(len(ids))).astype(np.int32)


def target_ids(d2t: Int[Array, " Vd"]) -> Int[Array, " Vd"]:
    """The target's ids of a reduced vocabulary."""
    return d2t + jnp.arange(len(d2t), dtype=d2t.dtype)


def draft_labels(
    tokens: Int[Array, "..."], d2t: Int[Array, " Vd"]
) -> tuple[Int[Array, "..."], Bool[Array, "..."]]:
    """The draft's ids of the target's, and which of them it has; for the others, some legal id.

    The target's ids ascend with the draft's.
    """
    ids = target_ids(d2t)
    index = jnp.minimum(jnp.searchsorted(ids, tokens), len(ids) - 1)
    return index.astype(jnp.int32), ids[index] == tokens
