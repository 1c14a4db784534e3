"""Prompt-lookup drafting: where the last tokens recur in the text so far, propose what followed.

No model and no training: the baseline that a draft must beat, alone or on top of a draft.
"""

import dataclasses
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from dflash_jax import array_typing as at
from dflash_jax.cache import read_rows
from dflash_jax.sampling import Picker, Proposals

MAX_NGRAM, MIN_NGRAM = 3, 2


def recurrence(
    text: at.Tokens, length: at.Rows, max_ngram: int = MAX_NGRAM, min_ngram: int = MIN_NGRAM
) -> tuple[at.Rows, Bool[Array, " B"]]:
    """Where each row's last tokens stood before: the end of the longest, then most recent match.

    Args:
        text: `[B, S]`; tokens at or past `length` are not looked at.
        length: Tokens of each row, at least 1.
        max_ngram, min_ngram: Tokens that a match compares at most, and at least.

    Returns:
        The position behind the match, 1..length - 1, where what followed begins; and whether there is
        a match. Without one the position means nothing, but lies in the text.
    """
    S = text.shape[1]
    end = jnp.arange(S, dtype=jnp.int32)[None]
    padded = jnp.pad(text, ((0, 0), (max_ngram, 0)))
    same, matched = jnp.ones(text.shape, bool), jnp.zeros(text.shape, jnp.int32)
    for k in range(1, max_ngram + 1):
        last = read_rows(padded, length - k + max_ngram, 1)
        same = same & (padded[:, max_ngram - k :][:, :S] == last) & (end >= k)
        matched = matched + same
    matched = jnp.where((matched >= min_ngram) & (end < length[:, None]), matched, 0)
    best = jnp.argmax(matched * S + end, axis=1).astype(jnp.int32)
    found = jnp.take_along_axis(matched, best[:, None], axis=1)[:, 0] > 0
    return jnp.where(found, best, jnp.maximum(length - 1, 0)), found


def continuation(
    text: at.Tokens, length: at.Rows, count: int, max_ngram: int, min_ngram: int
) -> tuple[Int[Array, "B P"], Bool[Array, "B P"]]:
    """The `count` tokens that followed each row's last ones before, and which of them the text holds.

    Past its end the copy reads on in itself: text that repeats goes on repeating. Rows without
    a match repeat their last token.
    """
    start, found = recurrence(text, length, max_ngram, min_ngram)
    step = jnp.arange(count, dtype=jnp.int32)[None]
    period = (length - start)[:, None]
    tokens = jnp.take_along_axis(text, start[:, None] + step % period, axis=1)
    return tokens, found[:, None] & (step < period)


@no_type_check  # JAX rebuilds it around shapes and shardings too
class Length(struct.PyTreeNode):
    """A draft's cache that holds nothing but the rows' lengths."""

    length: at.Rows

    @classmethod
    def zeros(cls, rows: int) -> "Length":
        return cls(jnp.zeros((rows,), jnp.int32))

    def resize(self, size: int) -> "Length":
        return self


@dataclasses.dataclass(frozen=True)
class Lookup:
    """`decode.DraftFns` without a model; its cache is a `Length`.

    A proposal is a certainty: under rejection it stays with the target's probability of it.
    """

    max_ngram: int = MAX_NGRAM
    min_ngram: int = MIN_NGRAM

    def __post_init__(self):
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"{self.min_ngram=} must be in [1, {self.max_ngram=}]")

    def extend(self, params: Any, context: at.Context, cache: Length) -> Length:
        return cache

    def propose(
        self, params: Any, text: at.Tokens, cache: Length, block_size: int, pick: Picker
    ) -> tuple[Proposals, Length]:
        tokens, _ = self.continuation(text, pick.anchor, block_size)
        return Proposals(tokens), cache

    def continuation(
        self, text: at.Tokens, anchor: at.Rows, block_size: int
    ) -> tuple[Int[Array, "B P"], Bool[Array, "B P"]]:
        return continuation(text, anchor + 1, block_size - 1, self.max_ngram, self.min_ngram)


@dataclasses.dataclass(frozen=True)
class Combined:
    """`decode.DraftFns` of a draft whose proposals give way, row by row, to what lookup finds.

    Behind the end of a short match stand the draft's own.
    """

    draft: Any
    lookup: Lookup = Lookup()

    def extend(self, params: Any, context: at.Context, cache: Any) -> Any:
        return self.draft.extend(params, context, cache)

    def propose(
        self, params: Any, text: at.Tokens, cache: Any, block_size: int, pick: Picker
    ) -> tuple[Proposals, Any]:
        own, cache = self.draft.propose(params, text, cache, block_size, pick)
        tokens, known = self.lookup.continuation(text, pick.anchor, block_size)
        return override(own, tokens.astype(own.tokens.dtype), known), cache


def override(own: Proposals, tokens: Int[Array, "B P"], known: Bool[Array, "B P"]) -> Proposals:
    """The proposals with the `known` of `tokens` in their place, each a certainty."""
    drafted = jnp.where(known, tokens, own.tokens)
    if own.q is None:
        return Proposals(drafted)
    first = jax.lax.broadcasted_iota(jnp.int32, own.q.shape, 0)
    if own.ids is None:
        return Proposals(drafted, jnp.where(known[None], first == tokens[None], own.q))
    # A token that is no candidate takes the first one's place, so that no id is there twice.
    ids = jnp.broadcast_to(own.ids, own.q.shape)
    absent = known & ~jnp.any(ids == tokens[None], axis=0)
    ids = jnp.where(absent[None] & (first == 0), tokens[None], ids)
    return Proposals(drafted, jnp.where(known[None], ids == tokens[None], own.q), ids)
