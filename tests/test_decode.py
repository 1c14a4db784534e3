import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import (
    DRAFT,
    MANY_ROUNDS,
    REPEAT,
    TARGET,
    VOCAB,
    Decoder,
    leaves_equal,
    live,
    new_tokens,
    prompts_of,
    random_draft,
    random_target,
    rounds_of,
    rows_of,
    script_of,
)

from dflash_jax.acceptance import num_accepted
from dflash_jax.cache import KVCache
from dflash_jax.decode import LENGTH, RUNNING, STOP, insert_rows
from dflash_jax.sampling import argmax
from dflash_jax.states import new_state

DEEP = pytest.mark.deep
PROMPTS = prompts_of(1, 2, 5, 17, 40)
NEW = 48
BLOCK = 4
SIZE = 128
FAR = SIZE - 40  # fills the longest row


@functools.cache
def target(dtype="float32", window=None):
    config = TARGET
    if window:
        layers = ("sliding_attention", "full_attention", "sliding_attention")
        config = dataclasses.replace(config, sliding_window=window, layer_types=layers)
    return random_target(config, dtype=jnp.dtype(dtype))


@functools.cache
def draft(dtype="float32"):
    return random_draft(dtype=jnp.dtype(dtype))


@functools.cache
def plain_rows(dtype="float32", window=None):
    """The prompts with far more tokens of plain decoding than most tests ask for."""
    return rows_of(Decoder(target(dtype, window)).run(PROMPTS, [FAR] * len(PROMPTS)))


def plain_tokens(window=None, count=NEW):
    return [row[len(p) :][:count] for p, row in zip(PROMPTS, plain_rows(window=window))]


def corrupted(rows, seed, keep=0.7):
    """The rows, with tokens at random positions replaced by wrong ones."""
    rng = np.random.default_rng(seed)
    return [[t if rng.random() < keep else (t + 1) % VOCAB for t in row] for row in rows]


def scripts(rows):
    """Drafts of every kind, for a target that continues as in `rows`."""
    rng = np.random.default_rng(7)
    return {
        "oracle": script_of(rows),
        "always wrong": script_of([[(t + 1) % VOCAB for t in row] for row in rows]),
        "random": jnp.asarray(rng.integers(VOCAB, size=(len(rows), 256)), jnp.int32),
        "repeats the anchor": jnp.full((len(rows), 256), REPEAT, jnp.int32),
        "sometimes right": script_of(corrupted(rows, seed=1)),
        "its own": None,
    }


def fresh_caches(decoder, state):
    """The caches after prefilling every row's committed tokens but the anchor."""
    return decoder.start([row[:-1] for row in rows_of(state)], [8] * len(state.length))


def assert_caches_equal_a_fresh_prefill(decoder, state):
    fresh = fresh_caches(decoder, state)
    for name in ("target", "draft"):
        ours, theirs = getattr(state, name), getattr(fresh, name)
        assert ours.length.tolist() == theirs.length.tolist() == (state.length - 1).tolist()
        for row in range(len(state.length)):
            for a, b in zip(live(ours, row), live(theirs, row), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# The target's tokens, whatever the draft


@pytest.mark.parametrize("block_size", [1, 4, *(pytest.param(q, marks=DEEP) for q in (2, 8, 16))])
def test_every_draft_gives_the_tokens_of_plain_decoding_in_float32(block_size):
    decoder, rows, expected = Decoder(target(), draft(), block_size), plain_rows(), plain_tokens()
    for name, script in scripts(rows).items():
        state = decoder.run(PROMPTS, [NEW] * len(PROMPTS), script=script)
        assert new_tokens(state, PROMPTS) == expected, name
        assert all(sum(counts) == NEW - 1 for counts in rounds_of(state)), name
        if name == "oracle":
            assert all(set(counts[:-1]) <= {block_size} for counts in rounds_of(state))
        if name == "always wrong":
            assert all(set(counts) == {1} for counts in rounds_of(state))


@pytest.mark.parametrize("block_size", [4, *(pytest.param(q, marks=DEEP) for q in (1, 2, 8, 16))])
def test_bfloat16_tokens_do_not_depend_on_the_draft(block_size):
    decoder = Decoder(target("bfloat16"), draft("bfloat16"), block_size)
    reference = decoder.run(PROMPTS, [NEW + 16] * len(PROMPTS))
    expected = [row[:NEW] for row in new_tokens(reference, PROMPTS)]
    for name, script in scripts(rows_of(reference)).items():
        state = decoder.run(PROMPTS, [NEW] * len(PROMPTS), script=script)
        assert new_tokens(state, PROMPTS) == expected, name


def test_a_drafts_nan_logits_cost_acceptance_only():
    broken = jax.tree.map(lambda x: x * jnp.nan, draft().params)
    decoder = Decoder(target(), dataclasses.replace(draft(), params=broken), BLOCK)
    state = decoder.run(PROMPTS, [NEW] * len(PROMPTS))
    assert new_tokens(state, PROMPTS) == plain_tokens()
    assert all(set(counts) == {1} for counts in rounds_of(state))


def test_prompts_of_any_length_are_prefilled_like_one_forward():
    prompts, new, size = prompts_of(1, 15, 16, 17, 31, 100, 300), 6, 384
    decoder = Decoder(target(), draft(), BLOCK)
    state = decoder.run(prompts, [new] * len(prompts), size=size)
    c, fns = TARGET, Decoder(target()).models.target
    # Causal, so one padded width serves all lengths.
    tokens = np.zeros((len(prompts), 320), np.int32)
    for line, row in zip(tokens, rows_of(state)):
        line[: len(row)] = row
    empty = KVCache.zeros(
        c.num_hidden_layers, len(prompts), c.num_key_value_heads, size, c.head_dim, jnp.float32
    )

    @jax.jit
    def predict(params, tokens):
        return argmax(fns.logits(params, fns.forward(params, tokens, empty)[0]))

    predicted = np.asarray(predict(decoder.params(), tokens))
    for b, (prompt, got) in enumerate(zip(prompts, new_tokens(state, prompts))):
        assert got == predicted[b, len(prompt) - 1 :][:new].tolist()


@pytest.mark.deep
def test_a_sliding_target_decodes_far_past_its_window_with_partial_acceptance():
    window = 6
    decoder = Decoder(target(window=window), draft(), BLOCK)
    rows = plain_rows(window=window)
    state = decoder.run(
        PROMPTS, [NEW] * len(PROMPTS), script=script_of(corrupted(rows, 2, keep=0.6))
    )
    assert new_tokens(state, PROMPTS) == plain_tokens(window) != plain_tokens()
    assert {1, 2, 3, 4} <= {c for counts in rounds_of(state) for c in counts}
    assert_caches_equal_a_fresh_prefill(decoder, state)


# Caches


def test_after_every_round_both_caches_equal_a_fresh_prefill():
    decoder = Decoder(target(), draft(), BLOCK)
    script = script_of(corrupted(plain_rows(), seed=5))
    state = decoder.start(PROMPTS, [NEW] * len(PROMPTS))
    assert_caches_equal_a_fresh_prefill(decoder, state)
    for _ in range(12):
        state = decoder.decode(state, script, max_rounds=1)
        assert_caches_equal_a_fresh_prefill(decoder, state)
    assert {1, 2, 3, 4} <= {c for counts in rounds_of(state) for c in counts}


def test_rejected_proposals_leave_no_trace():
    decoder, rows = Decoder(target(), draft(), BLOCK), plain_rows()
    ends = []
    for wrong in (1, 9):
        # Slot 1 is right, slots 2 and 3 are wrong, in two ways.
        bad = [
            [*row[: len(p) + 2], *((t + wrong) % VOCAB for t in row[len(p) + 2 :])]
            for p, row in zip(PROMPTS, rows)
        ]
        state = decoder.start(PROMPTS, [NEW] * len(PROMPTS))
        state = decoder.decode(state, script_of(bad), max_rounds=1)
        assert rounds_of(state) == [[2]] * len(PROMPTS)
        state = decoder.decode(state, max_rounds=3)
        ends.append(
            (rows_of(state), [(live(state.target, b), live(state.draft, b)) for b in range(5)])
        )
    assert ends[0][0] == ends[1][0]
    assert leaves_equal(ends[0][1], ends[1][1])


# Rows


def test_a_ragged_batch_equals_the_single_runs():
    decoder = Decoder(target(), draft(), BLOCK)
    rows = corrupted(plain_rows(), seed=4)
    batch = decoder.run(PROMPTS, [NEW] * len(PROMPTS), script=script_of(rows))
    for b, prompt in enumerate(PROMPTS):
        single = decoder.run([prompt], [NEW], script=script_of(rows[b : b + 1]))
        assert rows_of(single)[0] == rows_of(batch)[b]
        assert rounds_of(single)[0] == rounds_of(batch)[b]
        for name in ("target", "draft"):
            ours, theirs = live(getattr(batch, name), b), live(getattr(single, name), 0)
            for x, y in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_its_neighbours_bit_for_bit():
    decoder = Decoder(target(), draft(), BLOCK)
    rows = corrupted(plain_rows(), seed=4)
    state = decoder.run(PROMPTS, [NEW] * len(PROMPTS), script=script_of(rows))
    others = [PROMPTS[4], *PROMPTS[1:4], PROMPTS[0]]
    changed = decoder.run(others, [9, NEW, 30, NEW, 9])
    for b in (1, 3):
        assert rows_of(changed)[b] == rows_of(state)[b]


def snapshot(state, row):
    n, r = int(state.length[row]), int(state.rounds[row])
    tokens, committed, finish = map(np.array, (state.tokens, state.committed, state.finish))
    caches = live(state.target, row), live(state.draft, row)
    return (tokens[row, :n], committed[row, :r], finish[row], n, r), caches


def test_finished_rows_are_frozen_while_others_run():
    decoder = Decoder(target(), draft(), BLOCK)
    limits = [3, NEW, 6, NEW, NEW]
    state = decoder.start(PROMPTS, limits)
    done = {}
    while np.any(np.asarray(state.finish) == RUNNING):
        state = decoder.decode(state, max_rounds=1)
        for row in np.flatnonzero(np.asarray(state.finish) != RUNNING).tolist():
            done.setdefault(row, snapshot(state, row))
    assert min(int(done[r][0][4]) for r in (0, 2)) < int(state.rounds.max()) - 10
    for row, before in done.items():
        assert leaves_equal(before, snapshot(state, row)), row


def test_inserted_rows_decode_like_a_run_of_their_own():
    decoder = Decoder(target(), draft(), BLOCK)
    expected = plain_tokens()
    state = decoder.run(PROMPTS, [4, 20, 4, 5, 6])
    before = snapshot(state, 1), snapshot(state, 3)
    fresh = decoder.start([PROMPTS[3], PROMPTS[4], *PROMPTS[:3]], [NEW] * len(PROMPTS))
    fresh = jax.tree.map(lambda x: x[:2], fresh)
    state = insert_rows(state, fresh, jnp.asarray([0, 2]))
    state = decoder.decode(state)
    prompts = [PROMPTS[3], PROMPTS[1], PROMPTS[4], PROMPTS[3], PROMPTS[4]]
    assert new_tokens(state, prompts) == [
        expected[3], expected[1][:20], expected[4], expected[3][:5], expected[4][:6]
    ]  # fmt: skip
    assert leaves_equal(before, (snapshot(state, 1), snapshot(state, 3)))


def test_prefill_leaves_finished_rows_alone():
    decoder = Decoder(target(), draft(), BLOCK)
    state = decoder.run(PROMPTS, [5, 9, 1, 2, 7])
    before = [snapshot(state, b) for b in range(len(PROMPTS))]
    state = decoder.prefill(state)
    assert leaves_equal(before, [snapshot(state, b) for b in range(len(PROMPTS))])


# Limits, stops, capacity


def test_every_limit_around_block_boundaries_is_exact():
    prompts, rows = [PROMPTS[2]] * 5, [plain_rows()[2]] * 5
    decoder = Decoder(target(), draft(), BLOCK)
    for limits in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 10, 11, 12, 13]):
        for script in (script_of(rows), script_of(corrupted(rows, seed=3)), None):
            state = decoder.run(prompts, limits, script=script)
            assert new_tokens(state, prompts) == [plain_tokens()[2][:n] for n in limits]
            assert state.finish.tolist() == [LENGTH] * 5
            assert [sum(c) for c in rounds_of(state)] == [max(n - 1, 0) for n in limits]


def first_occurrences(b):
    """Indices of prompt b's new tokens that did not occur in its new tokens before."""
    tokens = plain_tokens()[b]
    return [k for k, t in enumerate(tokens[:16]) if t not in tokens[:k]]


@pytest.mark.parametrize("other", [None, 60])
def test_a_stop_id_ends_its_row_in_every_slot_of_a_block(other):
    decoder, ends = Decoder(target(), draft(), BLOCK), [first_occurrences(b) for b in range(5)]
    slots = set()
    for case in range(min(len(e) for e in ends)):
        at = [e[case] for e in ends]
        expected = [tokens[: k + 1] for tokens, k in zip(plain_tokens(), at)]
        stops = [tokens[-1] for tokens in expected]
        if other is not None:
            expected = [t[: t.index(other) + 1] if other in t else t for t in expected]
        fresh = new_state(target(), PROMPTS, [NEW] * 5, () if other is None else (7, other), SIZE)
        fresh = fresh.replace(stop_ids=fresh.stop_ids.at[:, 2].set(jnp.asarray(stops)))
        state = decoder.prefill(fresh)
        for script in (script_of(plain_rows()), None):
            end = decoder.decode(jax.tree.map(jnp.copy, state), script)
            assert new_tokens(end, PROMPTS) == expected
            assert end.finish.tolist() == [STOP] * 5
            assert [sum(c) + 1 for c in rounds_of(end)] == [len(t) for t in expected]
        # With an oracle a round commits BLOCK tokens; the first token is prefill's.
        slots |= {"first" if len(t) == 1 else (len(t) - 2) % BLOCK for t in expected}
    assert slots == {"first", *range(BLOCK)}


def test_a_stop_id_on_the_last_allowed_token_is_a_stop():
    ends = [first_occurrences(b)[-1] for b in range(5)]
    expected = [tokens[: k + 1] for tokens, k in zip(plain_tokens(), ends)]
    decoder, script = Decoder(target(), draft(), BLOCK), script_of(plain_rows())
    for b, tokens in enumerate(expected):
        limits = [len(t) for t in expected]
        state = decoder.run(PROMPTS, limits, [tokens[-1]], script=script)
        assert new_tokens(state, PROMPTS)[b] == tokens
        assert state.finish[b] == STOP
        limits[b] -= 1
        state = decoder.run(PROMPTS, limits, [tokens[-1]], script=script)
        assert new_tokens(state, PROMPTS)[b] == tokens[:-1]
        assert state.finish[b] == LENGTH


def test_a_mask_id_that_the_target_emits_is_kept():
    assert any(DRAFT.mask_token_id in tokens[1:-1] for tokens in plain_tokens())
    decoder = Decoder(target(), draft(), BLOCK)
    for script in (script_of(plain_rows()), None):
        assert new_tokens(decoder.run(PROMPTS, [NEW] * 5, script=script), PROMPTS) == plain_tokens()


def test_a_row_may_end_on_the_last_slot_and_none_is_written_past_it():
    new = SIZE - (BLOCK - 1) - len(PROMPTS[4])
    prompts, rows = [PROMPTS[4]] * 5, [plain_rows()[4]] * 5
    expected = rows[0][len(PROMPTS[4]) :]
    wrong = script_of([[(t + 1) % VOCAB for t in row] for row in rows])  # a round commits one
    decoder = Decoder(target(), draft(), BLOCK)
    state = decoder.run(prompts, [new] * 5, script=wrong)
    assert new_tokens(state, prompts) == [expected[:new]] * 5

    state = decoder.decode(decoder.start(prompts, [new + 1] * 5), wrong)
    assert state.finish.tolist() == [RUNNING] * 5
    assert new_tokens(state, prompts) == [expected[:new]] * 5
    assert_caches_equal_a_fresh_prefill(decoder, state)
    state = decoder.decode(state.resize(2 * SIZE), wrong)
    assert state.finish.tolist() == [LENGTH] * 5
    assert new_tokens(state, prompts) == [expected[: new + 1]] * 5


@pytest.mark.deep
def test_growing_changes_no_token():
    decoder = Decoder(target(), draft(), BLOCK)
    script = script_of(corrupted(plain_rows(), seed=6))
    state = decoder.decode(decoder.start(PROMPTS, [NEW] * 5, size=64), script)
    assert RUNNING in state.finish.tolist()
    state = decoder.decode(state.resize(SIZE), script)
    assert new_tokens(state, PROMPTS) == plain_tokens()
    assert all(sum(counts) == NEW - 1 for counts in rounds_of(state))


@pytest.mark.parametrize("max_rounds", [1, 3])
def test_cutting_a_run_into_calls_changes_nothing(max_rounds):
    decoder = Decoder(target(), draft(), BLOCK)
    script = script_of(corrupted(plain_rows(), seed=8))
    whole = decoder.run(PROMPTS, [NEW] * len(PROMPTS), script=script)
    state = decoder.start(PROMPTS, [NEW] * len(PROMPTS))
    calls = 0
    while np.any(np.asarray(state.finish) == RUNNING):
        state, calls = decoder.decode(state, script, max_rounds), calls + 1
    assert calls == -(-int(whole.rounds.max()) // max_rounds)
    assert rows_of(state) == rows_of(whole)
    assert rounds_of(state) == rounds_of(whole)


def test_no_rounds_are_run_when_none_are_asked_for_or_needed():
    decoder = Decoder(target(), draft(), BLOCK)
    state = decoder.start(PROMPTS, [1] * len(PROMPTS))
    assert state.finish.tolist() == [LENGTH] * len(PROMPTS)
    state = decoder.decode(state, max_rounds=MANY_ROUNDS)
    assert state.rounds.tolist() == [0] * len(PROMPTS)
    state = decoder.decode(decoder.start(PROMPTS, [NEW] * len(PROMPTS)), max_rounds=0)
    assert state.rounds.tolist() == [0] * len(PROMPTS)


# Parts


@pytest.mark.parametrize(
    ("drafted", "predicted", "expected"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 2, 9, 4], 2),
        ([1, 2, 3], [1, 9, 3, 4], 1),
        ([1, 2, 3], [9, 2, 3, 4], 0),
        ([1, 1, 1], [9, 9, 9, 9], 0),
        ([], [5], 0),
    ],
)
def test_the_agreeing_prefix_is_counted(drafted, predicted, expected):
    rows = jnp.asarray([drafted, drafted], jnp.int32).reshape(2, -1)
    counts = num_accepted(rows, jnp.asarray([predicted, predicted], jnp.int32))
    assert counts.tolist() == [expected] * 2
    assert counts.dtype == jnp.int32


def test_the_choice_is_the_first_of_equal_maxima_and_nan_is_no_token():
    logits = jnp.asarray(
        [[0.0, 5.0, 5.0], [7.0, 7.0, 7.0], [1.0, jnp.nan, 2.0], [-jnp.inf, -1.0, -jnp.inf]]
    )
    assert argmax(logits.T[:, None]).tolist() == [[1, 0, 3, 1]]


def test_a_block_needs_an_anchor():
    with pytest.raises(ValueError, match="block_size=0"):
        _ = Decoder(target(), draft(), 0).models
