"""Drafting from the text itself: against a search in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.acceptance import dense
from dflash_jax.lookup import Length, Lookup, continuation, override, recurrence
from dflash_jax.sampling import Proposals

WIDTH = 24
jitted = jax.jit(continuation, static_argnums=(2, 3, 4))


def search(text, count, max_ngram, min_ngram):
    """(proposals, how many of them the text holds) of one row's committed tokens."""
    for n in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                copied = list(text)
                for k in range(count):
                    copied.append(copied[end + k])
                return copied[len(text) :], min(count, len(text) - end)
    return [text[-1]] * count, 0


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(1, 1), (3, 2), (4, 1), (2, 2)])
def test_proposals_are_those_of_a_search_in_python(max_ngram, min_ngram):
    rng = np.random.default_rng(0)
    texts = [rng.integers(2 + n % 5, size=1 + n % WIDTH).tolist() for n in range(240)]
    padded = rng.integers(7, size=(len(texts), WIDTH))  # behind a row there is anything
    for row, text in zip(padded, texts):
        row[: len(text)] = text
    length = jnp.asarray([len(t) for t in texts], jnp.int32)
    tokens, known = jitted(jnp.asarray(padded, jnp.int32), length, 7, max_ngram, min_ngram)
    counts = set()
    for row, held, text in zip(tokens.tolist(), known.tolist(), texts):
        expected, count = search(text, 7, max_ngram, min_ngram)
        assert row == expected
        assert held == [k < count for k in range(7)]
        counts.add(count)
    assert {0, 1, 3, 7} <= counts


def test_longer_matches_come_before_more_recent_ones():
    text = jnp.asarray([[1, 2, 3, 9, 4, 2, 3, 8, 1, 2, 3, 0, 0]], jnp.int32)
    length = jnp.asarray([11], jnp.int32)
    assert [x.tolist() for x in recurrence(text, length)] == [[3], [True]]
    assert [x.tolist() for x in recurrence(text, length, 2, 2)] == [[7], [True]]


def test_lookup_wants_ngrams_that_exist():
    with pytest.raises(ValueError, match="min_ngram"):
        Lookup(max_ngram=2, min_ngram=3)


def test_its_cache_is_the_rows_lengths():
    cache = Length.zeros(3)
    assert cache.resize(64).replace(length=cache.length + 2).length.tolist() == [2, 2, 2]


# What remains of the draft's own proposals


def own_proposals(candidates):
    rng = np.random.default_rng(1)
    ids = None
    if candidates:
        draws = [rng.permutation(9)[:4] for _ in range(6)]
        ids = jnp.asarray(np.stack(draws, axis=1).reshape(4, 2, 3), jnp.int32)
    q = rng.dirichlet(np.ones(4 if candidates else 9), size=(2, 3))
    q = jnp.asarray(np.moveaxis(q, -1, 0), jnp.float32)
    best = jnp.argmax(q, axis=0)
    tokens = best if ids is None else jnp.take_along_axis(ids, best[None], axis=0)[0]
    return Proposals(tokens.astype(jnp.int32), q, ids)


@pytest.mark.parametrize("candidates", [False, True])
def test_a_lookup_is_a_certainty_among_the_drafts_distributions(candidates):
    own = own_proposals(candidates)
    for token in range(9):
        known = jnp.asarray([[True, False, True], [False, True, False]])
        tokens = jnp.full((2, 3), token, jnp.int32)
        mixed = override(own, tokens, known)
        assert mixed.tokens.tolist() == jnp.where(known, tokens, own.tokens).tolist()
        sure = jax.nn.one_hot(tokens, 9, axis=0)
        wanted = jnp.where(known[None], sure, dense(own, 9))
        np.testing.assert_array_equal(dense(mixed, 9), wanted)
        if candidates:  # each id once, or the distribution would depend on the order
            ordered = np.sort(np.asarray(mixed.ids), axis=0)
            assert (np.diff(ordered, axis=0) > 0).all()


def test_certain_proposals_stay_certain():
    own = Proposals(jnp.asarray([[1, 2]], jnp.int32))
    mixed = override(own, jnp.asarray([[5, 6]], jnp.int32), jnp.asarray([[True, False]]))
    assert mixed.tokens.tolist() == [[5, 2]]
    assert mixed.q is None
