import jax.numpy as jnp
import numpy as np
from fakes import leaves_equal
from runs import set_up

from train.inputs import make_step_input


def test_a_steps_input_depends_on_the_step_alone(store, tiny_setup):
    other = set_up(store, tiny_setup.config.run)
    (a, ids_a), (b, ids_b), (c, _) = (make_step_input(s, n) for s, n in ((tiny_setup, 4), (other, 4), (other, 5)))  # fmt: skip
    assert leaves_equal(a, b)
    assert np.array_equal(ids_a, ids_b)
    assert not np.array_equal(a.anchors, c.anchors)


def test_a_steps_labels_index_the_head_rows_of_their_tokens(store, tmp_path):
    setup = set_up(store, tmp_path, candidates=60)
    blocks, ids = make_step_input(setup, 0)
    assert len(ids) == 60
    tokens = np.asarray(jnp.asarray(ids)[blocks.labels])
    real = np.asarray(blocks.counts)
    assert real.any()
    np.testing.assert_array_equal(tokens[:, :, 0], blocks.anchor_tokens)
    known = {tuple(e.tokens[i : i + 4]) for e in setup.examples for i in range(len(e.tokens) - 3)}
    whole = [tuple(t) for t, r in zip(tokens.reshape(-1, 4), real.reshape(-1, 4)) if r[1:].all()]
    assert whole
    assert set(whole) <= known


def test_without_candidates_the_whole_vocabulary_takes_part(store, tmp_path):
    few, ids = make_step_input(set_up(store, tmp_path, candidates=60), 0)
    every, none = make_step_input(set_up(store, tmp_path, candidates=0), 0)
    assert none is None
    np.testing.assert_array_equal(every.labels, jnp.asarray(ids)[few.labels])


def test_a_recipe_with_visible_prefixes_has_the_same_anchors_and_fewer_labels(store, tiny_setup):
    other = set_up(store, tiny_setup.config.run, prefix_base=0.9)
    plain, shown = (make_step_input(setup, 0)[0] for setup in (tiny_setup, other))
    np.testing.assert_array_equal(shown.anchors, plain.anchors)
    assert set(np.unique(shown.first)) == {2, 3}
    assert set(np.unique(plain.first)) == {1}
    slot = np.arange(4)[None, None]
    np.testing.assert_array_equal(shown.counts, plain.counts & (slot >= shown.first[:, :, None]))
