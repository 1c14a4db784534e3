"""Decoded texts follow the target's own filtered distribution, whatever the draft: counted, not argued.

The models are tables, token before to logits, so that hundreds of thousands of texts cost nothing
and every probability is known. Two ways of getting it wrong must fail the same test.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import random_params
from flax import struct
from frequencies import assert_does_not_follow, assert_follows
from heads import SMALL, small_config

from dflash_jax.cache import read_rows
from dflash_jax.decode import RUNNING, Models, State, decode, prefill
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.sampling import (
    TARGET,
    VERIFY,
    Proposals,
    RowSampling,
    join,
    probabilities,
    sample,
)

V, ROWS, BATCHES, SIZE = 5, 20_000, 10, 16
FILTERS = {
    "none": (1.0, 0, 1.0),
    "cool": (0.6, 0, 1.0),
    "top_k": (1.0, 3, 1.0),
    "top_p": (1.3, 0, 0.8),
}
START = 2


class Length(struct.PyTreeNode):
    """The cache of a model that remembers nothing."""

    length: jax.Array


@dataclasses.dataclass(frozen=True)
class TableTarget:
    """`params["target"][before]` are the logits behind token `before`."""

    def forward(self, params, tokens, cache):
        hidden = jax.nn.one_hot(tokens, V, axis=0)
        return hidden, hidden[:0], cache

    def logits(self, params, hidden):
        return jnp.einsum("XV,XBT->VBT", params["target"], hidden)


def honest(pick, logits, slot):
    return pick(logits, slot)


def judged_against_its_softmax(pick, logits, slot):
    """The bias of failures A18: the likeliest token, judged as if it had been drawn."""
    token = jnp.argmax(logits, axis=0).astype(jnp.int32)
    return Proposals(token, probabilities(logits, pick.rows))


def with_the_targets_noise(pick, logits, slot):
    """The bias of failures A46: drawn with the noise that picks the target's token after a rejection."""
    positions = pick.anchor[:, None] + slot
    token = sample(logits, pick.rows, positions, stream=TARGET)
    return Proposals(token, probabilities(logits, pick.rows))


@dataclasses.dataclass(frozen=True)
class TableDraft:
    """Walks its own table, slot by slot, or proposes every slot from the anchor alone."""

    walks: bool = True
    propose_one: object = honest

    def extend(self, params, context, cache):
        return cache

    def propose(self, params, text, cache, block_size, pick):
        before, parts = read_rows(text, pick.anchor, 1), []
        for slot in range(1, block_size):
            logits = jnp.moveaxis(params["draft"][before], -1, 0)
            parts.append(self.propose_one(pick, logits, slot))
            before = parts[-1].tokens if self.walks else before
        return join(parts), cache


@dataclasses.dataclass(frozen=True)
class HeadDraft:
    """A real head over hidden states and logits that are tables of the anchor."""

    name: str

    @property
    def config(self):
        return dataclasses.replace(
            small_config(self.name), vocab_size=V, mask_token_id=0, head=FEW[self.name]
        )

    def extend(self, params, context, cache):
        return cache

    def propose(self, params, text, cache, block_size, pick):
        anchor = read_rows(text, pick.anchor, 1)[:, 0]
        hidden = params["hidden"][: block_size - 1, anchor].transpose(2, 1, 0)
        # Close enough to the target's own for long prefixes to be accepted.
        logits = jnp.broadcast_to(
            params["draft"][anchor].T[:, :, None], (V, len(anchor), block_size - 1)
        )
        given = hidden, logits, anchor, lambda tokens: params["embed"][:, tokens], pick
        module = DFlashDraftModel(self.config)
        return module.apply({"params": params[self.name]}, *given, method="propose"), cache


FEW = SMALL | {"dflash2": dataclasses.replace(SMALL["dflash2"], selector_top_k=3)}
HEAD_NAMES = ("dflash2", "domino", "dspark")


@functools.cache
def tables(seed=0):
    """The target's, a draft that agrees with it in part, and what the heads read."""
    rng = np.random.default_rng(seed)
    target = rng.normal(0, 1.2, (V, V))
    draft = target + rng.normal(0, 0.8, (V, V))
    D = small_config("plain").hidden_size
    arrays = {
        "target": target, "draft": draft, "hidden": rng.normal(0, 1, (4, V, D)), "embed": rng.normal(0, 1, (D, V)),
    }  # fmt: skip
    heads = {name: random_params(HeadDraft(name).config, seed=3) for name in HEAD_NAMES}
    return heads | {k: jnp.asarray(x, jnp.float32) for k, x in arrays.items()}


def texts(models, filters, new_tokens=3):
    """`[BATCHES * ROWS, new_tokens]` decoded tokens."""
    out = []
    for batch in range(BATCHES):
        temperature, top_k, top_p = (jnp.full((ROWS,), x) for x in filters)  # donated
        ones = jnp.ones((ROWS,), jnp.int32)
        state = State(
            tokens=jnp.full((ROWS, SIZE), START, jnp.int32),
            length=ones,
            limit=ones + new_tokens,
            stop_ids=jnp.full((ROWS, 1), -1, jnp.int32),
            finish=jnp.full((ROWS,), RUNNING, jnp.int32),
            rounds=jnp.zeros((ROWS,), jnp.int32),
            committed=jnp.zeros((ROWS, SIZE), jnp.int32),
            sampling=RowSampling(
                temperature, top_k, top_p, jax.random.split(jax.random.key(batch), ROWS)
            ),
            target=Length(jnp.zeros((ROWS,), jnp.int32)),
            draft=None if models.draft is None else Length(jnp.zeros((ROWS,), jnp.int32)),
        )
        state = prefill(models.target, models.draft, tables(), state, chunk=1)
        state = decode(models, tables(), state, np.int32(100))
        out.append(np.asarray(state.tokens[:, 1 : 1 + new_tokens]))
    return np.concatenate(out)


@functools.cache
def expected(filters):
    """The filtered distribution behind each token, `[V, V]`."""
    temperature, top_k, top_p = (jnp.full((1,), x) for x in filters)
    rows = RowSampling(temperature, top_k, top_p, jax.random.split(jax.random.key(0), 1))
    return np.asarray(probabilities(tables()["target"].T[:, None], rows))[:, 0].T


def assert_exact(tokens, filters):
    """Single tokens, and texts of two and three, against the product of the table's rows."""
    p = expected(filters)
    pairs = p[START][:, None] * p
    assert_follows(tokens[:, 0], p[START])
    assert_follows(tokens[:, 0] * V + tokens[:, 1], pairs.reshape(-1))
    triples = (pairs[:, :, None] * p[None]).reshape(-1)
    assert_follows((tokens[:, 0] * V + tokens[:, 1]) * V + tokens[:, 2], triples)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("verify", VERIFY)
def test_texts_follow_the_target(verify, filters):
    models = Models(TableTarget(), TableDraft(walks=False), 3, verify)
    assert_exact(texts(models, FILTERS[filters]), FILTERS[filters])


@pytest.mark.deep
@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("head", HEAD_NAMES)
def test_texts_drafted_by_every_head_follow_the_target(verify, head):
    models = Models(TableTarget(), HeadDraft(head), 3, verify)
    for filters in FILTERS.values():
        assert_exact(texts(models, filters), filters)


@pytest.mark.parametrize("filters", FILTERS)
def test_coupled_texts_are_those_of_plain_decoding(filters):
    drafted = texts(Models(TableTarget(), TableDraft(), 3), FILTERS[filters])
    plain = texts(Models(TableTarget(), None, 1), FILTERS[filters])
    assert np.array_equal(drafted, plain)


@pytest.mark.parametrize("biased", [judged_against_its_softmax, with_the_targets_noise])
def test_the_biased_rules_fail(biased):
    models = Models(TableTarget(), TableDraft(propose_one=biased), 3, "rejection")
    tokens, p = texts(models, FILTERS["none"]), expected(FILTERS["none"])
    pairs = p[START][:, None] * p
    assert_does_not_follow(tokens[:, 0] * V + tokens[:, 1], pairs.reshape(-1))
