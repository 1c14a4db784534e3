"""Filters, noise and rejection, against dflash 0.1.0's values and against frequencies."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frequencies import assert_follows
from safetensors.numpy import load_file

from dflash_jax import acceptance, sampling
from dflash_jax.sampling import (
    CANDIDATES,
    DRAFT,
    TARGET,
    RowSampling,
    Sampling,
    argmax,
    gumbel,
    keep_of_ranked,
    position_keys,
)

sample = jax.jit(sampling.sample, static_argnames=("stream",))
probabilities, reject = jax.jit(sampling.probabilities), jax.jit(acceptance.reject)
GOLDEN = Path(__file__).parent / "golden/sampling/zlab_rejection"
CASES = json.loads((GOLDEN / "case.json").read_text())["cases"]
FILTERS = [(0, 1.0), (5, 1.0), (0, 0.8), (7, 0.6), (70, 1.0), (70, 0.99), (1, 1.0)]


def rows_of(temperature=1.0, top_k=0, top_p=1.0, rows=1, seed=0):
    def full(x, dtype):
        return jnp.broadcast_to(jnp.asarray(x, dtype), (rows,))

    keys = jax.random.split(jax.random.key(seed), rows)
    return RowSampling(
        full(temperature, jnp.float32), full(top_k, jnp.int32), full(top_p, jnp.float32), keys
    )


def random_logits(*shape, seed=0, scale=2.0):
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, shape), jnp.float32)


@pytest.mark.parametrize("size", [1, 7, 63, 64, 96, 515, 768, 4096])
def test_argmax_is_numpys_in_any_number_of_chunks(size):
    """Among equals the first, in one chunk or in two; -inf are logits too; NaN gives no id."""
    rng = np.random.default_rng(size)
    logits = rng.integers(-3, 3, (size, 2, 40)).astype(np.float32)  # ties in every column
    logits[:, 1, 0] = -np.inf
    logits[:-1, 1, 1] = -np.inf  # the last is the largest
    logits[-1, 1, 1] = -1e30
    assert argmax(jnp.asarray(logits)).tolist() == logits.argmax(axis=0).tolist()
    for place in {0, size // 2, size - 1}:
        faulty = logits.copy()
        faulty[place, 0, 3] = np.nan
        expected = logits.argmax(axis=0)
        expected[0, 3] = size
        for f in (argmax, jax.jit(argmax)):
            assert f(jnp.asarray(faulty)).tolist() == expected.tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"case{c['case']}")
def test_filters_and_rejection_are_the_references(case):
    arrays = load_file(GOLDEN / "expected.safetensors")
    x = {
        k.removeprefix(f"c{case['case']}_"): v
        for k, v in arrays.items()
        if k.startswith(f"c{case['case']}_")
    }
    rows = rows_of(case["temperature"], case["top_k"], case["top_p"])
    p = probabilities(jnp.asarray(x["target_logits"].T[:, None]), rows)
    q = probabilities(jnp.asarray(x["draft_logits"].T[:, None]), rows)
    if not case["probs_overridden"]:
        np.testing.assert_allclose(p[:, 0].T, x["target_probs"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(q[:, 0].T, x["draft_probs"], rtol=1e-4, atol=1e-6)
    p, q = (jnp.asarray(x[f"{side}_probs"].T[:, None]) for side in ("target", "draft"))
    drafted = jnp.asarray(x["draft_tokens"], jnp.int32)[None]
    accepted, after = reject(p, q, drafted, jnp.asarray(x["uniforms"])[None])
    assert accepted[0] == x["accepted"] == case["accepted"]
    np.testing.assert_allclose(after[:, 0], x["next_distribution"], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
@pytest.mark.parametrize("temperature", [0.7])
def test_samples_follow_the_filtered_distribution(temperature, top_k, top_p):
    draws, V = 30_000, 80
    logits = jnp.broadcast_to(random_logits(V, 1, 1), (V, draws, 1))
    rows = rows_of(temperature, top_k, top_p, rows=draws)
    tokens = sample(logits, rows, jnp.zeros((draws, 1), jnp.int32))
    one = rows_of(temperature, top_k, top_p)
    assert_follows(tokens[:, 0], probabilities(logits[:, :1], one)[:, 0, 0])


def test_two_positions_are_independent():
    draws, V = 200_000, 5
    logits = jnp.broadcast_to(random_logits(V, 1, 1, scale=0.7), (V, draws, 2))
    positions = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32)[None], (draws, 2))
    tokens = sample(logits, rows_of(rows=draws), positions)
    p = jax.nn.softmax(logits[:, 0, 0])
    assert_follows(tokens[:, 0] * V + tokens[:, 1], jnp.outer(p, p).reshape(-1))


def test_temperature_zero_is_the_argmax_with_any_filter():
    logits = random_logits(70, 3, 4)
    rows = rows_of(0.0, [0, 3, 0], [1.0, 0.5, 0.2], rows=3)
    positions = jnp.zeros((3, 4), jnp.int32)
    assert sample(logits, rows, positions).tolist() == argmax(logits).tolist()
    assert probabilities(logits, rows).max(axis=0).tolist() == np.ones((3, 4)).tolist()


@pytest.mark.parametrize(
    "neighbour", [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 150, 1.0), (1.0, 3, 0.5)]
)
@pytest.mark.parametrize("own", [(1.0, 5, 1.0), (0.7, 0, 0.9), (1.0, 0, 1.0), (1.0, 199, 0.97)])
def test_a_rows_tokens_do_not_depend_on_its_neighbours_filters(own, neighbour):
    """Whatever way of sampling the batch as a whole needs."""
    logits = random_logits(200, 1, 50, scale=4.0)
    positions = jnp.arange(50)[None]
    keys = jax.random.split(jax.random.key(1), 2)
    alone = sample(logits, rows_of(*own).replace(key=keys[:1]), positions)
    both = [jnp.asarray(x) for x in zip(own, neighbour)]
    rows = RowSampling(both[0], both[1].astype(jnp.int32), both[2], keys)
    pair = sample(jnp.tile(logits, (1, 2, 1)), rows, jnp.tile(positions, (2, 1)))
    assert pair[0].tolist() == alone[0].tolist()


def noise_of(rows, stream, positions, ids):
    return gumbel(position_keys(rows, stream, positions), ids)


def test_noise_depends_on_key_stream_position_and_id_alone():
    ids = jnp.arange(9, dtype=jnp.int32)[:, None, None] + jnp.zeros((9, 2, 3), jnp.int32)
    rows, positions = rows_of(rows=2), jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    noise = noise_of(rows, TARGET, positions, ids)
    assert len(np.unique(noise)) == noise.size
    assert np.array_equal(noise_of(rows, TARGET, positions, ids[::-1]), noise[::-1])
    swapped = rows.replace(key=rows.key[::-1])
    assert np.array_equal(noise_of(swapped, TARGET, positions[::-1], ids), noise[:, ::-1])
    assert not np.any(np.asarray(noise_of(rows, DRAFT, positions, ids)) == np.asarray(noise))


def test_with_top_k_noise_is_made_for_candidates_only():
    """The cost does not grow with the vocabulary: no hash over more than the candidates in that branch."""
    V, B, T = 5000, 2, 3
    positions = jnp.zeros((B, T), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda x, rows: sample(x, rows, positions))(
        random_logits(V, B, T), rows_of(1.0, 20, 1.0, rows=B)
    )
    sizes = sorted(set(_hashes(jaxpr.jaxpr)))
    # One slot at a time.
    assert sizes[0] <= CANDIDATES * B < V * B == sizes[-1]
    assert CANDIDATES * B in sizes


def _hashes(jaxpr):
    """Sizes of every random hash in a jaxpr, branches included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("random_fold_in", "threefry2x32"):
            yield eqn.outvars[0].aval.size
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _hashes(inner)


def test_ids_name_the_tokens():
    logits = random_logits(6, 2, 3)
    ids = jnp.asarray([5, 3, 9, 1, 0, 7], jnp.int32)
    for rows in (rows_of(0.0, rows=2), rows_of(1.0, rows=2), rows_of(1.0, 3, 1.0, rows=2)):
        positions = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
        dense = jnp.full((10, 2, 3), -jnp.inf).at[ids].set(logits)
        named = sample(logits, rows, positions, ids=ids)
        assert named.tolist() == sample(dense, rows, positions).tolist()


@pytest.mark.parametrize("size", [7, 4096])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (1.0, 0), (1.0, 5)])
def test_nan_logits_give_an_id_that_no_vocabulary_has(temperature, top_k, size):
    logits = random_logits(size, 1, 2).at[3, 0, 1].set(jnp.nan)
    tokens = sample(logits, rows_of(temperature, top_k), jnp.zeros((1, 2), jnp.int32))
    assert tokens[0, 0] < size <= tokens[0, 1]


def test_top_p_keeps_the_token_that_crosses_it():
    ranked = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))[None, None]
    kept = [
        keep_of_ranked(ranked, jnp.zeros((1, 1)), rows_of(1.0, k, p))[0, 0].sum()
        for k, p in ((0, 0.4), (0, 0.6), (0, 0.81), (0, 1.0), (2, 1.0), (2, 0.6), (3, 0.9))
    ]
    # Top-k renormalises first: .625 and .375 of two, .526, .316 and .158 of three.
    assert [int(k) for k in kept] == [1, 2, 3, 4, 2, 1, 3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1),
        ("top_p", 0.0), ("top_p", 1.1),
    ],
)  # fmt: skip
def test_settings_out_of_bounds_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})
