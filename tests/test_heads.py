"""The draft heads: against the references' numbers, and what every head must keep."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import (
    CHUNK,
    DRAFT,
    MANY_ROUNDS,
    VOCAB,
    prompts_of,
    random_draft,
    random_target,
    rounds_of,
    rows_of,
)
from heads import SMALL, small_config
from safetensors.numpy import load_file
from test_draft import (
    Case,
    block,
    bound,
    check_run,
    embed,
    extend,
    head,
    load_case,
    names_of_runs,
)
from test_lookup import search

from dflash_jax import generate
from dflash_jax.adapters import bind
from dflash_jax.cache import KVCache
from dflash_jax.checkpoint import keys
from dflash_jax.config.heads import Domino, DSpark
from dflash_jax.decode import decode, prefill
from dflash_jax.lookup import MAX_NGRAM, MIN_NGRAM
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.models.heads import HEADS
from dflash_jax.models.transformer import Transformer
from dflash_jax.sampling import Proposals, Sampling, argmax, probabilities
from dflash_jax.states import new_draft_cache, new_state, row_sampling

SLOTS = 48


# Against the references' numbers


@pytest.fixture
def dflash2(golden):
    return load_case(golden, "dflash2")


@pytest.fixture
def domino(golden):
    return load_case(golden, "domino")


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


def proposals_of(case: Case, config, hidden, logits, anchor, pick, *given) -> Proposals:
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
    case = load_case(golden, name)
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
    module, (fns, params) = DFlashDraftModel(c), bound(case)
    cache = KVCache.zeros(
        c.num_hidden_layers, 1, c.num_key_value_heads, SLOTS, c.head_dim, jnp.float32
    )
    for prefix in prefixes:
        ids = jnp.asarray(case.expected[prefix + "block_ids"], jnp.int32)
        cache = extend(module, case.draft.params, case.expected[prefix + "features"], cache)
        hidden, cache = block(module, case.draft.params, embed(fns, params, ids), cache)
        case.close(hidden, case.expected[prefix + "hidden"], "hidden")
        names = [prefix + "logits", prefix + "base_logits"]
        (logits,) = [case.expected[name] for name in names if name in case.expected]
        case.close(head(fns, params, hidden), logits, "logits")


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
    logits = head(*bound(domino), hidden)
    config, P = domino.draft.config, len(hidden) - 1
    anchor = domino.expected[f"rand{i}_block_ids"][0]
    got = proposals_of(domino, config, hidden[:P], logits[:P], anchor, greedy)
    assert got.tokens[0].tolist() == domino.expected[f"rand{i}_tokens"].tolist()


# What every draft must keep


PROMPTS = prompts_of(3, 9, 20)
PROMPTS[1] = PROMPTS[1] * 3  # text that repeats, for lookup
NEW, BLOCK = 24, 4
# The same prompts greedily, sampled, and sampled with filters.
KINDS = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.8, top_k=20, top_p=0.9)]


@functools.cache
def target(dtype="float32"):
    return random_target(dtype=dtype)


@functools.cache
def draft(name):
    return random_draft(small_config(name))


def run(draft, block_size, verify="coupled", lookup=False, rows=1, seed=0, dtype="float32"):
    """The state at the end of `KINDS` x `PROMPTS`, each `rows` times."""
    models, params = bind(target(dtype), draft, block_size, verify, lookup)
    prompts, kinds = PROMPTS * len(KINDS) * rows, [k for k in KINDS for _ in PROMPTS] * rows
    row_keys = jax.random.split(jax.random.key(seed), len(prompts))
    state = new_state(target(dtype), prompts, [NEW] * len(prompts), (), 128, kinds, row_keys)
    if models.draft is not None:
        state = state.replace(draft=new_draft_cache(draft, len(prompts), 128))
    state = prefill(models.target, models.draft, params, state, chunk=CHUNK)
    return decode(models, params, state, MANY_ROUNDS)


@functools.cache
def plain_rows():
    return rows_of(run(None, 1))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "lookup"),
    [
        ("domino", False),
        ("dspark", False),
        ("dflash2", False),
        ("lookup", False),
        ("dflash2", True),
    ],
)
def test_tokens_do_not_depend_on_the_head_greedily_or_coupled(name, lookup):
    state = run("lookup" if name == "lookup" else draft(name), BLOCK, lookup=lookup)
    assert rows_of(state) == plain_rows()
    assert all(sum(counts) == NEW - 1 for counts in rounds_of(state))


LAYOUTS = {
    "ring": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
    "bidirectional": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6, "is_causal": False},
    "causal": {"is_causal": True},
    "anchored": {"sample_from_anchor": True, "output_multiplier": 2.0, "final_logit_softcapping": 5.0},
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*(n for n in SMALL if n != "plain"), *LAYOUTS])
def test_neither_head_nor_layout_changes_a_token_greedily_or_coupled(name, dtype):
    config = small_config(name) if name in SMALL else dataclasses.replace(DRAFT, **LAYOUTS[name])
    state = run(random_draft(config, seed=8, dtype=dtype), BLOCK, dtype=dtype)
    assert rows_of(state) == rows_with_the_plain_draft(dtype)


@pytest.mark.deep
def test_dominos_head_over_a_reduced_vocabulary_changes_no_token():
    config = dataclasses.replace(small_config("domino unshifted"), draft_vocab_size=VOCAB // 2)
    made = random_draft(config, seed=8)
    assert made.params["embed_proj"]["2"]["weight"].shape == (VOCAB // 2, 6)
    made.params["d2t"] = jnp.arange(VOCAB // 2, dtype=jnp.int32)  # the even ids
    state = run(made, BLOCK)
    assert rows_of(state) == rows_with_the_plain_draft("float32")


@functools.cache
def rows_with_the_plain_draft(dtype):
    return rows_of(run(random_draft(dtype=dtype), BLOCK, dtype=dtype))


@pytest.mark.deep
def test_under_rejection_a_greedy_row_is_plain_decodings():
    state = run(draft("dflash2"), BLOCK, "rejection", lookup=True)
    greedy_rows = len(PROMPTS)
    assert rows_of(state)[:greedy_rows] == plain_rows()[:greedy_rows]
    assert all(sum(counts) == NEW - 1 for counts in rounds_of(state))
    assert all(0 <= t < VOCAB for row in rows_of(state) for t in row)


def test_training_blocks_with_filters_equal_decoded_ones():
    """Filters stop at a block's ends: what the blocks before and behind it hold changes nothing."""
    config, anchors, size, length = small_config("dflash2"), [4, 1, 9], 4, 11
    module, params = DFlashDraftModel(config), draft("dflash2").params
    rng = np.random.default_rng(2)
    width = len(config.target_layer_ids) * config.hidden_size
    context = jnp.asarray(rng.standard_normal((length, width)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((3 * size, config.hidden_size)), jnp.float32)
    hidden = jax.jit(functools.partial(module.apply, method="blocks"))(
        {"params": params}, x.T[:, None], context.T[:, None], jnp.asarray([anchors], jnp.int32)
    )
    empty = KVCache.zeros(2, 1, 1, 32, config.head_dim, jnp.float32)
    everything = extend(module, params, context, empty)
    for a, anchor in enumerate(anchors):
        cache = everything.replace(length=jnp.asarray([anchor], jnp.int32))
        expected, _ = block(module, params, x[a * size : (a + 1) * size], cache)
        ours = hidden[:, 0, a * size : (a + 1) * size].T
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_dsparks_bigram_term_is_the_token_befores():
    config, rng = small_config("dspark"), np.random.default_rng(3)
    params, P = draft("dspark").params, 5
    assert HEADS[DSpark](config).first_slot == 0
    logits, anchor = rng.standard_normal((P, VOCAB)).astype(np.float32), 7
    case = Case(target(), draft("dspark"), {}, {})
    got = proposals_of(case, config, np.zeros((P, config.hidden_size)), logits, anchor, greedy)
    w1, w2 = (np.asarray(params["markov_head"][f"markov_w{i}"]["weight"]) for i in (1, 2))
    expected = [anchor]
    for row in logits:
        expected.append(int(np.argmax(row + w2 @ w1[expected[-1]])))
    assert got.tokens[0].tolist() == expected[1:]
    assert expected[1:] != logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_markov_heads_of_unknown_numerics_are_refused_by_name(kind):
    with pytest.raises(ValueError, match=f"markov_head_type='{kind}'"):
        DSpark(markov_rank=4, markov_head_type=kind)


def test_lookup_on_top_of_lookup_is_refused():
    with pytest.raises(ValueError, match="lookup=True goes with a draft model"):
        bind(target(), "lookup", lookup=True)


@pytest.mark.parametrize("name", ["dflash2", "dflash2_sliding", "domino"])
def test_the_parameters_are_the_checkpoints_own_and_leave_under_published_names(golden, name):
    """z-lab's own save calls the codebooks `.weight`, and nobody else reads that."""
    case = load_case(golden, name)
    published = load_file(case.draft.source / "model.safetensors")
    published = {k.replace("codebook.weight", "codebook"): v for k, v in published.items()}
    ours = {keys.name_of(path): leaf for path, leaf in keys.flatten(case.draft.params).items()}
    assert sorted(ours) == sorted(published)
    for k, leaf in ours.items():
        np.testing.assert_array_equal(leaf, published[k])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dflash2", {"conv_group_size": 5}, "conv_group_size=5 does not divide hidden_size=32"),
        ("dflash2", {"selector_top_k": 65}, "selector_top_k=65 is above vocab_size=64"),
        ("dflash2", {"selector_rank": 0}, "selector_rank=0 must be at least 1"),
        ("domino", {"pure_draft_prefix_len": -1}, "pure_draft_prefix_len=-1 must be at least 0"),
        ("dspark", {"markov_rank": 0}, "markov_rank=0 must be at least 1"),
    ],
)
def test_numbers_out_of_bounds_raise(name, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DRAFT, head=dataclasses.replace(SMALL[name], **change))


# Whole generations


@pytest.mark.parametrize(
    "name", ["dflash2", pytest.param("dflash2_sliding", marks=pytest.mark.deep)]
)
def test_generation_with_dflash2_equals_the_references(golden, name):
    """Whole, short and stopped runs: one program for all."""
    case = load_case(golden, name)
    kinds = ("gen", "gen_max1", "gen_max2", "gen_max5", "gen_stop", "gen_stopfirst")
    names = names_of_runs(case, *kinds)
    assert len(names) == 12
    for run in names:
        check_run(case, run)


@pytest.mark.parametrize("i", [0, 1])
def test_generation_with_domino_equals_the_references(domino, i):
    ids = domino.expected[f"gen_p{i}_ids"].tolist()
    counts = domino.expected[f"gen_p{i}_counts"].tolist()
    prompt = ids[:-48]
    out = generate(domino.target, domino.draft, [prompt], max_new_tokens=48, stop_token_ids=())
    assert out.tokens[0] == ids[-48:]
    # The reference's last round runs past the limit, ours is cut.
    assert out.rounds[0][:-1] == counts[: len(out.rounds[0]) - 1]
    assert len(out.rounds[0]) <= len(counts)
    assert sum(out.rounds[0]) == 47


def test_lookup_generates_plain_decodings_tokens_and_the_counts_of_a_search(golden):
    case = load_case(golden, "dflash2")
    ids = case.expected["gen_bs1_p0_ids"].tolist()
    out = generate(
        case.target, "lookup", [ids[:-48]], max_new_tokens=48, stop_token_ids=(), block_size=5
    )
    assert out.tokens[0] == ids[-48:]
    done, counts = len(ids) - 47, []
    while done < len(ids):
        proposals, _ = search(ids[:done], 4, MAX_NGRAM, MIN_NGRAM)
        right = 0
        while right < min(4, len(ids) - done) and proposals[right] == ids[done + right]:
            right += 1
        counts.append(min(right + 1, len(ids) - done))
        done += counts[-1]
    assert out.rounds[0] == counts
