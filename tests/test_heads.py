"""The draft heads: against the references' numbers, and what every head must keep."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import HeadCase, load_head_case
from test_draft import block, embed, extend, head

from dflash_jax.cache import KVCache
from dflash_jax.config.heads import Domino
from dflash_jax.generation import row_sampling
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.models.heads import HEADS
from dflash_jax.models.transformer import Transformer
from dflash_jax.sampling import Proposals, Sampling, argmax, probabilities

SLOTS = 48


# Against the references' numbers


@pytest.fixture
def dflash2(golden):
    return load_head_case(golden, "dflash2")


@pytest.fixture
def domino(golden):
    return load_head_case(golden, "domino")


def columns(x):
    """Rows `[T, X]` of one sequence as `[X, 1, T]`."""
    return jnp.asarray(x, jnp.float32).T[:, None]


@functools.partial(jax.jit, static_argnames=("module", "target", "pick"))
def propose(module, target, params, hidden, logits, anchor, pick, *given):
    """Proposals of one row from states and logits `[P, ...]`; `params` are the draft's and the target's."""
    draft, of_target = params

    def embed(tokens):
        return target.apply({"params": of_target}, tokens, method="embed")

    picker = functools.partial(pick, *given)
    inputs = columns(hidden), columns(logits), jnp.reshape(anchor, (1,)), embed, picker
    return module.apply({"params": draft}, *inputs, method="propose")


def proposals_of(case: HeadCase, config, hidden, logits, anchor, pick, *given) -> Proposals:
    module, target = DFlashDraftModel(config), Transformer(case.target.config)
    params = case.draft.params, case.target.params
    anchor = jnp.asarray(anchor, jnp.int32)
    return propose(module, target, params, hidden, logits, anchor, pick, *given)


def greedy(logits, slot, ids=None):
    """Argmax; its `q` are the logits themselves, for the tests to look at."""
    best = argmax(logits)
    tokens = best if ids is None else jnp.take_along_axis(ids, best[None], axis=0)[0]
    return Proposals(tokens.astype(jnp.int32), logits, ids)


def warm(logits, slot, ids):
    """The candidates' distribution at temperature 0.7, and its likeliest id."""
    q = probabilities(logits, row_sampling([Sampling(temperature=0.7)], None, 1))
    return greedy(q, slot, ids)


@pytest.mark.parametrize("name", ["dflash2", "dflash2_sliding"])
@pytest.mark.parametrize("prefix", ["in0_", "in0_round2_", "in1_", "in1_round2_"])
def test_the_selector_walks_like_the_references(golden, name, prefix):
    case = load_head_case(golden, name)
    hidden, logits = case.expected[prefix + "hidden"], case.expected[prefix + "logits"]
    given = case, case.draft.config, hidden[1:], logits[1:], case.expected[prefix + "block_ids"][0]
    cold, hot = proposals_of(*given, greedy), proposals_of(*given, warm)
    candidates = np.sort(np.asarray(cold.ids)[:, 0].T, axis=1)
    assert candidates.tolist() == case.expected[prefix + "selector_candidates_sorted"].tolist()
    assert cold.tokens[0].tolist() == case.expected[prefix + "selector_path"].tolist()
    assert hot.tokens[0].tolist() == case.expected[prefix + "selector_t07_path"].tolist()
    q = np.zeros((len(logits) - 1, logits.shape[1]), np.float32)
    np.put_along_axis(q, np.asarray(hot.ids)[:, 0].T, np.asarray(hot.q)[:, 0].T, axis=1)
    case.close(q, case.expected[prefix + "selector_t07_q_dense"], "selector_t07_q_dense")


def test_candidates_come_largest_first_and_the_lower_id_first_among_equals(dflash2):
    c = dflash2.draft.config
    logits = np.zeros((5, c.vocab_size), np.float32)
    logits[:, [200, 7]] = 1
    cold = proposals_of(dflash2, c, np.zeros((5, c.hidden_size)), logits, 3, greedy)
    assert cold.ids[:, 0].T.tolist() == [[7, 200, 0, 1]] * 5


def check_two_rounds(case, prefixes):
    """The draft's states and logits of blocks on one cache."""
    c = case.draft.config
    module, target = DFlashDraftModel(c), Transformer(case.target.config)
    cache = KVCache.zeros(
        c.num_hidden_layers, 1, c.num_key_value_heads, SLOTS, c.head_dim, jnp.float32
    )
    for prefix in prefixes:
        ids = jnp.asarray(case.expected[prefix + "block_ids"], jnp.int32)
        cache = extend(module, case.draft.params, case.expected[prefix + "features"], cache)
        hidden, cache = block(
            module, case.draft.params, embed(target, case.target.params, ids), cache
        )
        case.close(hidden, case.expected[prefix + "hidden"], "hidden")
        names = [prefix + "logits", prefix + "base_logits"]
        (logits,) = [case.expected[name] for name in names if name in case.expected]
        case.close(head(target, case.target.params, hidden), logits, "logits")


@pytest.mark.parametrize("j", [0, 1])
def test_convolved_states_of_two_rounds_equal_the_references(dflash2, j):
    check_two_rounds(dflash2, [f"in{j}_", f"in{j}_round2_"])


@pytest.mark.parametrize("j", [0, 1])
def test_dominos_states_equal_the_references(domino, j):
    check_two_rounds(domino, [f"in{j}_"])


def with_flags(config, shift, pure):
    flags = {"shift_label": bool(shift), "pure_draft_prefix_len": pure}
    return dataclasses.replace(config, head=dataclasses.replace(config.head, **flags))


def taught(tokens, logits, slot, ids=None):
    """The given tokens of slots 0..P, whatever the logits, which are kept as `q`."""
    return Proposals(jax.lax.dynamic_slice_in_dim(tokens, slot, logits.shape[2])[None], logits)


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize("pure", [0, 1, 2])
@pytest.mark.parametrize("shift", [0, 1])
def test_domino_proposes_like_the_reference(domino, i, shift, pure):
    config = with_flags(domino.draft.config, shift, pure)
    first, e = HEADS[Domino](config).first_slot, domino.expected
    P = config.block_size - 1
    hidden, logits = (e[f"in{i}_{name}"][first : first + P] for name in ("hidden", "base_logits"))
    # Which slots are read is all that the shift decides: one program serves both.
    given = domino, with_flags(config, 0, pure), hidden, logits
    got = proposals_of(*given, e[f"in{i}_block_ids"][0], greedy)
    assert got.tokens[0].tolist() == e[f"in{i}_shift{shift}_pure{pure}_tokens"].tolist()
    previous = jnp.asarray(e[f"in{i}_prev_ids"], jnp.int32)
    final = proposals_of(*given, previous[0], taught, previous).q[:, 0].T
    wanted = e[f"in{i}_shift{shift}_pure{pure}_teacher_logits"][first : first + P]
    domino.close(final, wanted, "logits")


@pytest.mark.parametrize("i", [0, 1])
def test_domino_proposes_like_the_reference_from_any_states(domino, i):
    hidden = domino.expected[f"rand{i}_hidden"]
    logits = head(Transformer(domino.target.config), domino.target.params, hidden)
    config, P = domino.draft.config, len(hidden) - 1
    anchor = domino.expected[f"rand{i}_block_ids"][0]
    got = proposals_of(domino, config, hidden[:P], logits[:P], anchor, greedy)
    assert got.tokens[0].tolist() == domino.expected[f"rand{i}_tokens"].tolist()
