"""The context cache of a draft whose layers all slide."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import DRAFT, random_draft, random_params
from test_draft import check_run, load_case

from dflash_jax import jobs, states
from dflash_jax.cache import KVCache, write_ring
from dflash_jax.models.draft import DFlashDraftModel, ring_size
from dflash_jax.states import new_draft_cache

WINDOW, WRITE, SIZE = 5, 6, 64
SLIDING = dataclasses.replace(
    DRAFT, layer_types=("sliding_attention",) * 2, sliding_window=WINDOW, is_causal=None
)


def empty(rows, ring):
    return KVCache.zeros(2, rows, 1, SIZE, DRAFT.head_dim, jnp.float32, ring)


@pytest.mark.parametrize("rows", [1, 3])
def test_writes_wrap(rows):
    buffer = np.zeros((rows, 2, 7, 3), np.float32)
    new = np.random.default_rng(0).standard_normal((rows, 2, 4, 3)).astype(np.float32)
    start = np.array([12, 0, 5], np.int32)[:rows]
    out = jax.jit(write_ring)(jnp.asarray(buffer), jnp.asarray(new), jnp.asarray(start))
    for b, s in enumerate(start):
        for i in range(4):
            buffer[b, :, (s + i) % 7] = new[b, :, i]
    np.testing.assert_array_equal(out, buffer)


def test_a_slot_holds_the_newest_position_that_falls_on_it():
    cache = empty(2, 4).replace(length=jnp.asarray([1, 9], jnp.int32))
    assert cache.held(2).tolist() == [[0, 1, 2, -1], [8, 9, 10, 7]]
    whole = empty(1, None).replace(length=jnp.asarray([3], jnp.int32))
    assert whole.held(2)[0, :5].tolist() == [0, 1, 2, 3, 4]
    assert (whole.held(2)[0, 5:] < 0).all()


def test_a_ring_grows_to_its_size_and_no_further():
    cache = KVCache.zeros(1, 1, 1, 4, 2, jnp.float32, ring=10)
    assert cache.size == 4
    cache = cache.replace(k=(jnp.ones((1, 1, 4, 2)),))
    assert cache.resize(8).size == 8
    full = cache.resize(16)
    assert full.size == 10
    np.testing.assert_array_equal(full.k[0][0, 0, :, 0], [1] * 4 + [0] * 6)
    assert full.resize(32) is full
    assert KVCache.zeros(1, 1, 1, 64, 2, jnp.float32, ring=10).size == 10


def test_only_a_draft_that_slides_everywhere_has_a_ring():
    def slots(config):
        return new_draft_cache(random_draft(config), 1, 512).size

    assert slots(SLIDING) == WINDOW + states.PREFILL_CHUNK
    assert slots(DRAFT) == 512
    mixed = dataclasses.replace(SLIDING, layer_types=("sliding_attention", "full_attention"))
    assert slots(mixed) == 512


def test_a_write_that_would_cover_the_window_raises():
    cache, params = empty(1, ring_size(SLIDING, WRITE)), random_params(SLIDING, 1)
    context = jnp.zeros((2 * SLIDING.hidden_size, 1, WRITE + 1))
    with pytest.raises(ValueError, match=r"7 rows needs more than the ring's 11 slots"):
        DFlashDraftModel(SLIDING).apply({"params": params}, context, cache, method="extend")


@pytest.mark.parametrize("rule", ["zlab", "speculators"])
def test_rounds_on_a_ring_equal_rounds_on_the_whole_context(rule):
    """Two rows of different lengths; each round commits some of the rows that it writes."""
    config = dataclasses.replace(SLIDING, window_rule=rule, is_causal=False)
    module, params = DFlashDraftModel(config), random_params(config, 1)
    rng = np.random.default_rng(0)
    taps = len(config.target_layer_ids) * config.hidden_size
    ring, whole = empty(2, ring_size(config, WRITE)), empty(2, None)

    @jax.jit
    def round_of(x, context, kept, cache):
        hidden, cache = module.apply({"params": params}, x, cache)
        cache = module.apply({"params": params}, context, cache, method="extend")
        return hidden, cache.replace(length=cache.length + kept)

    for _ in range(12):
        x = jnp.asarray(rng.standard_normal((config.hidden_size, 2, 4)), jnp.float32)
        context = jnp.asarray(rng.standard_normal((taps, 2, WRITE)), jnp.float32)
        kept = jnp.asarray(rng.integers(1, 6, 2), jnp.int32)
        ours, ring = round_of(x, context, kept, ring)
        expected, whole = round_of(x, context, kept, whole)
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
        for b, n in enumerate(ring.length.tolist()):
            newest = np.arange(max(0, n - WINDOW), n)
            for a, w in zip((*ring.k, *ring.v), (*whole.k, *whole.v)):
                np.testing.assert_array_equal(a[b][:, newest % ring.size], w[b][:, newest])
    assert min(ring.length) > ring.size


@pytest.mark.deep
@pytest.mark.parametrize("name", ["dflash_sliding_causal", "dflash_sliding_bidirectional"])
def test_generations_that_wrap_equal_the_references(golden, monkeypatch, name):
    for module in (jobs, states):
        monkeypatch.setattr(module, "PREFILL_CHUNK", 16)
    case = load_case(golden, name)
    ids = case.expected["gen_p1_ids"]
    assert new_draft_cache(case.draft, 1, 256).size < len(ids) / 2
    check_run(case, "gen_p1")


@pytest.mark.parametrize("slides", [True, False])
def test_a_feature_older_than_the_window_moves_full_layers_only(slides):
    kind = "sliding_attention" if slides else "full_attention"
    config = dataclasses.replace(
        DRAFT, num_hidden_layers=1, layer_types=(kind,), sliding_window=WINDOW, is_causal=False
    )
    module, params = DFlashDraftModel(config), random_params(config, 1)
    rng = np.random.default_rng(0)
    taps = len(config.target_layer_ids) * config.hidden_size
    x = jnp.asarray(rng.standard_normal((config.hidden_size, 1, 4)), jnp.float32)
    context = rng.standard_normal((taps, 1, 12)).astype(np.float32)
    run = jax.jit(functools.partial(module.apply, {"params": params}, method="blocks"))

    def hidden(context):
        return np.asarray(run(x, jnp.asarray(context), jnp.asarray([[12]], jnp.int32)))

    older, within = context.copy(), context.copy()
    older[:, :, 12 - WINDOW] += 1
    within[:, :, 12 - WINDOW + 1] += 1
    assert np.array_equal(hidden(older), hidden(context)) == slides
    assert not np.array_equal(hidden(within), hidden(context))
