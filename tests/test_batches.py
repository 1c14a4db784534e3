"""Whatever the draft, the batch and the way a run is cut into calls: the same key gives the same text."""

import functools
import itertools

import jax
import numpy as np
import pytest
from fakes import prompts_of, random_draft, random_target

from dflash_jax import Sampling, generate, stream
from dflash_jax.decode import decode, prefill
from dflash_jax.jobs import make_job
from dflash_jax.pair import Draft, Target

PROMPTS = prompts_of(1, 7, 40, 3, 90, 12)
SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=0.5, top_k=40, top_p=0.95),
    Sampling(temperature=2.0),
]
NEW = 40


@functools.cache
def pair(dtype="float32") -> tuple[Target, Draft]:
    return random_target(dtype=dtype), random_draft(dtype=dtype)


@functools.cache
def keys():
    return jax.random.split(jax.random.key(5), len(PROMPTS))


@functools.cache
def alone():
    """Each prompt by itself, without a draft."""
    target, _ = pair()
    return [
        generate(target, None, [p], max_new_tokens=NEW, sampling=s, key=keys()[i : i + 1]).tokens[0]
        for i, (p, s) in enumerate(zip(PROMPTS, SETTINGS))
    ]


@pytest.mark.parametrize(
    ("rows", "block_size"),
    [
        (3, 4),
        *(
            pytest.param(*x, marks=pytest.mark.deep)
            for x in [(6, 1), (1, 4), (4, 4), (6, 4), (3, 8)]
        ),
    ],
)
def test_neither_the_batch_nor_the_queue_nor_the_draft_changes_a_text(rows, block_size):
    target, draft = pair()
    options = {"max_new_tokens": NEW, "block_size": block_size, "rows": rows}
    out = generate(target, draft, PROMPTS, sampling=SETTINGS, key=keys(), **options)
    assert out.tokens == alone()
    assert [sum(r) for r in out.rounds] == [NEW - 1] * len(PROMPTS)


def test_the_order_of_the_rows_changes_no_text():
    target, draft = pair()
    order = np.array([3, 0, 5, 2, 1, 4])
    out = generate(
        target, draft, [PROMPTS[i] for i in order], sampling=[SETTINGS[i] for i in order],
        key=keys()[order], max_new_tokens=NEW, block_size=4, rows=3,
    )  # fmt: skip
    assert out.tokens == [alone()[i] for i in order]


@pytest.mark.deep
def test_in_bfloat16_the_draft_changes_no_text():
    target, draft = pair("bfloat16")
    other = random_draft(seed=9, dtype="bfloat16")
    options = {"max_new_tokens": NEW, "block_size": 4, "sampling": SETTINGS, "key": keys()}
    first = generate(target, draft, PROMPTS, **options)
    assert generate(target, other, PROMPTS, **options).tokens == first.tokens


def test_one_key_gives_each_prompt_its_own():
    target, draft = pair()
    options = {"max_new_tokens": 20, "block_size": 4, "sampling": Sampling(temperature=1.0)}
    twins = [PROMPTS[2]] * 3
    texts = generate(target, draft, twins, key=jax.random.key(1), **options).tokens
    assert len({tuple(t) for t in texts}) == 3
    assert generate(target, draft, twins, key=jax.random.key(1), **options).tokens == texts
    assert generate(target, draft, twins, key=jax.random.key(2), **options).tokens != texts


@pytest.mark.deep
def test_a_queue_keeps_the_rows_busy_through_growth_and_early_ends():
    """Short and long prompts and texts in turn, two rows, and a prompt beyond the first capacity."""
    target, draft = pair()
    prompts = prompts_of(5, 230, 9, 300, 2, 17)
    stop = tuple(range(0, 64, 9))
    options = {"max_new_tokens": 60, "stop_token_ids": stop}
    single = [generate(target, None, [p], **options) for p in prompts]
    out = generate(target, draft, prompts, rows=2, block_size=4, **options)
    assert out.tokens == [s.tokens[0] for s in single]
    assert out.finish == [s.finish[0] for s in single]
    assert "stop" in out.finish


def test_a_queue_leaves_a_long_prompts_capacity_behind():
    """300 tokens, then short ones in its place: their rounds do not read 512 slots."""
    target, draft = pair()
    prompts = prompts_of(300, 5, 9)
    options = {"stop_token_ids": (), "sampling": Sampling(), "key": None}
    job = make_job(target, draft, prompts, 8, **options, block_size=4)
    found = {index: (row.tokens, state.size) for index, row, state in job.run(job.start([0]))}
    single = [generate(target, None, [p], max_new_tokens=8, stop_token_ids=()) for p in prompts]
    assert found == {i: (s.tokens[0], 512 if i == 0 else 256) for i, s in enumerate(single)}


@pytest.mark.parametrize("new", [0, 1])
def test_a_queue_of_prompts_that_end_in_prefill(new):
    target, draft = pair()
    out = generate(target, draft, PROMPTS, rows=3, block_size=4, max_new_tokens=new)
    assert [len(t) for t in out.tokens] == [new] * len(PROMPTS)


def test_a_queue_compiles_no_more_than_its_shapes():
    target, draft = pair()
    options = {"rows": 2, "block_size": 5, "max_new_tokens": 12}
    generate(target, draft, PROMPTS[:3], **options)
    before = prefill._cache_size(), decode._cache_size()
    for settings in (SETTINGS, Sampling(temperature=0.3, top_k=2)):
        generate(
            target, draft, PROMPTS, sampling=settings, key=keys(), stop_token_ids=(3,), **options
        )
    assert (prefill._cache_size(), decode._cache_size()) == before


@pytest.mark.parametrize(
    "verify", ["rejection", pytest.param("rejection_argmax", marks=pytest.mark.deep)]
)
def test_rejection_is_reproducible_and_greedy_at_temperature_0(verify):
    target, draft = pair()
    options = {"max_new_tokens": 20, "block_size": 4, "key": keys(), "rows": 3}
    warm = Sampling(temperature=1.0, verify=verify)
    first = generate(target, draft, PROMPTS, sampling=warm, **options)
    assert generate(target, draft, PROMPTS, sampling=warm, **options).tokens == first.tokens
    cold = generate(target, draft, PROMPTS, sampling=Sampling(verify=verify), **options)
    assert cold.tokens == generate(target, None, PROMPTS, max_new_tokens=20, rows=3).tokens


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("with_draft", [True, False])
def test_a_stream_is_the_same_text_in_pieces(rounds, with_draft):
    target, draft = pair()
    pieces, out = [], None
    options = {"max_new_tokens": NEW, "sampling": SETTINGS[3], "key": keys()[3:4]}
    if with_draft:
        options["block_size"] = 4
    parts = stream(target, draft if with_draft else None, PROMPTS[3], rounds=rounds, **options)
    while out is None:
        try:
            pieces.append(next(parts))
        except StopIteration as end:
            out = end.value
    assert all(pieces)
    assert len(pieces) > 5
    assert list(itertools.chain(*pieces)) == out.tokens[0] == alone()[3]


def test_a_stream_ends_with_its_stop_id():
    target, draft = pair()
    stop = alone()[0][9]
    pieces = stream(
        target, draft, PROMPTS[0], max_new_tokens=NEW, stop_token_ids=(stop,), block_size=4
    )
    assert list(itertools.chain(*pieces)) == alone()[0][: alone()[0].index(stop) + 1]


@pytest.mark.parametrize("with_draft", [True, False])
def test_a_kept_state_goes_on_as_if_the_text_had_been_the_prompt(with_draft):
    target, draft = pair()
    draft, options = (draft, {"block_size": 4}) if with_draft else (None, {})
    options["max_new_tokens"] = 30
    prompts, turns = PROMPTS[1:4], [[5, 6, 7], [], prompts_of(200)[0]]
    first = generate(target, draft, prompts, keep_state=True, **options)
    second = generate(target, draft, turns, state=first.state, keep_state=True, **options)
    third = generate(target, draft, [[1], [2], [3]], state=second.state, **options)
    texts = [p + t + turn for p, t, turn in zip(prompts, first.tokens, turns)]
    assert second.tokens == generate(target, None, texts, max_new_tokens=30).tokens
    texts = [x + t + [i] for i, (x, t) in enumerate(zip(texts, second.tokens), 1)]
    again = generate(target, draft, texts, **options)
    assert third.tokens == again.tokens
    assert third.rounds == again.rounds, "the draft's context is whole"


def test_what_is_cached_is_not_computed_again(monkeypatch):
    """The target reads the new tokens only: as many chunks as they fill, whatever came before."""
    target, draft = pair()
    first = generate(target, draft, [PROMPTS[4]], max_new_tokens=30, block_size=4, keep_state=True)
    lengths = []
    monkeypatch.setattr(
        "dflash_jax.jobs.prefill",
        lambda target, draft, params, state, chunk: (
            lengths.append(
                (int(state.length[0]), int(state.target.length[0]), int(state.draft.length[0]))
            )
            or prefill(target, draft, params, state, chunk=chunk)
        ),
    )
    generate(target, draft, [[1, 2]], max_new_tokens=3, block_size=4, state=first.state)
    assert lengths == [(122, 119, 119)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": [Sampling()]}, "1 sampling settings for 2 prompts"),
        (
            {"sampling": [Sampling(), Sampling(verify="rejection")]},
            r"different verify: \['coupled', 'rejection'\]",
        ),
        ({"key": jax.random.split(jax.random.key(0), 3)}, r"key has shape \(3,\)"),
        ({"key": jax.random.PRNGKey(0)}, "make it with jax.random.key"),
        ({"rows": 0}, "rows=0 must be at least 1"),
        ({"rows": 1, "keep_state": True}, "a state of 2 prompts does not fit rows=1"),
    ],
)
def test_mistakes_are_named(options, message):
    target, draft = pair()
    with pytest.raises(ValueError, match=message):
        generate(target, draft, PROMPTS[:2], max_new_tokens=4, **options)


def test_a_state_is_good_for_one_call_of_its_own_kind():
    target, draft = pair()
    options = {"max_new_tokens": 3, "block_size": 4}
    state = generate(target, draft, PROMPTS[:3], keep_state=True, **options).state
    with pytest.raises(ValueError, match="1 prompts for a state of 3 rows"):
        generate(target, draft, [[1]], state=state, **options)
    with pytest.raises(ValueError, match="made with a draft"):
        generate(target, None, [[1], [1], [1]], state=state, max_new_tokens=3)
    generate(target, draft, [[1], [1], [1]], state=state, **options)
    with pytest.raises(ValueError, match="consumed by an earlier call"):
        generate(target, draft, [[1], [1], [1]], state=state, **options)
