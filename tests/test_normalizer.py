import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from train import normalizer as module
from train.normalizer import normalizer

rng = np.random.default_rng(0)
HEAD = rng.standard_normal((23, 6)).astype(np.float32)
STATES = rng.standard_normal((6, 5)).astype(np.float32)


@pytest.mark.parametrize("ids", [23, 8, 7, 1], ids="{} at a time".format)
def test_it_is_the_softmaxs_own_however_many_ids_are_looked_at(monkeypatch, ids):
    """8 and 7 leave a shorter last part; ids 3 and 20 tie for row 0, in two parts but for 23."""
    monkeypatch.setattr(module, "IDS", ids)
    head = HEAD.copy()
    head[3] = head[20] = 2 * STATES[:, 0]
    out = jax.jit(lambda *x: normalizer(*x))(head, STATES)  # IDS is no part of a program's key
    logits = head.astype(np.float64) @ STATES
    weights = np.exp(logits)
    assert_allclose(out.log, np.log(weights.sum(axis=0)), rtol=1e-6)
    assert_allclose(out.mean, head.T @ (weights / weights.sum(axis=0)), rtol=1e-5, atol=1e-6)
    assert out.likeliest[0] == 3
    assert_array_equal(out.likeliest[1:], np.argmax(logits, axis=0)[1:])


def test_a_row_that_is_no_number_is_no_other_rows_trouble():
    states = STATES.copy()
    states[0, 2] = np.nan
    out = jax.jit(normalizer)(HEAD, states)
    assert np.isnan(out.log).tolist() == [False, False, True, False, False]
    assert out.likeliest[2] >= len(HEAD)
    assert normalizer(jnp.asarray(HEAD), jnp.asarray(STATES), gradient=False).mean is None


def test_nothing_as_large_as_the_logits_is_held():
    """At most a quarter; also for an odd number of ids."""
    for vocab in (16 * module.IDS, 16 * module.IDS - 5):
        head, states = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((vocab, 8), (8, 64)))
        memory = jax.jit(normalizer).lower(head, states).compile().memory_analysis()
        assert memory.temp_size_in_bytes < vocab * 64 * 4 / 4
