import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fakes import leaves_equal
from runs import TARGET, begin, recipe

from dflash_jax.checkpoint.orbax import plain
from dflash_jax.pair import load_draft
from train.checkpoints import open_checkpoints
from train.draft import export
from train.inputs import make_step_input
from train.objective import Objective
from train.optimizer import keep_average, make_optimizer, make_schedule, trained_params
from train.restore import read_draft
from train.step import train_step
from train.warm_start import fold_scale


def test_float32_masters_keep_a_thousand_updates_of_1e_5(tiny_setup):
    """In bfloat16 a weight of 1 would never move."""
    constant = optax.stateless(lambda u, p: jax.tree.map(lambda x: jnp.full_like(x, 1e-5), u))
    state = begin(tiny_setup)
    state = state.replace(opt_state=constant.init(state.params))
    blocks, ids = make_step_input(tiny_setup, 0)
    before = np.asarray(state.params["hidden_norm"]["weight"])
    rest = tiny_setup.embedding, jnp.asarray(ids), blocks
    with jax.set_mesh(tiny_setup.mesh):
        for _ in range(1000):
            state, _ = train_step(
                state, *rest, module=tiny_setup.module, optimizer=constant, objective=Objective(), chunk=64,
                head=tiny_setup.head,
            )  # fmt: skip
    moved = np.asarray(state.params["hidden_norm"]["weight"]) - before
    np.testing.assert_allclose(moved, 1e-2, rtol=1e-2)
    assert int(state.step) == 1000


PARAMS = {"norm": {"weight": np.ones(3)}, "fc": {"weight": np.ones((3, 4))}, "candidate_selector": {"successor_codebook": np.ones((5, 3))}}  # fmt: skip


def update(config, gradients, params=PARAMS):
    optimizer = make_optimizer(config)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return optimizer.update(gradients, optimizer.init(params), params)[0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_frozen_norm_does_not_decay_and_a_matrix_does(tmp_path, optimizer):
    config = recipe(tmp_path, optimizer=optimizer, warmup=0, weight_decay=0.5)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), PARAMS)
    updates = update(config, zeros)
    np.testing.assert_array_equal(updates["norm"]["weight"], 0)
    for table in (updates["fc"], updates["candidate_selector"]):
        jax.tree.map(lambda x: np.testing.assert_allclose(x, -0.5 * 3e-3, rtol=1e-5), table)


def test_muon_makes_a_matrix_update_orthogonal_and_leaves_the_rest_to_adamw(tmp_path):
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), PARAMS)  # fmt: skip
    options = dict(warmup=0, weight_decay=0.0, clip=1e9)
    muon, adamw = (update(recipe(tmp_path, optimizer=o, **options), gradients) for o in ("muon", "adamw"))  # fmt: skip
    assert leaves_equal(muon["norm"], adamw["norm"])
    assert leaves_equal(muon["candidate_selector"], adamw["candidate_selector"])
    singular = np.linalg.svd(np.asarray(muon["fc"]["weight"]) / 3e-3, compute_uv=False)
    assert singular.max() / singular.min() < 2
    given = np.linalg.svd(np.asarray(gradients["fc"]["weight"]), compute_uv=False)
    assert given.max() / given.min() > 2
    rms = (
        np.sqrt(np.mean(np.square(muon["fc"]["weight"]))) / 3e-3
    )  # AdamW's is about 0.2 of the rate
    assert 0.1 < rms < 0.3


@pytest.mark.parametrize(("schedule", "middle"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])  # fmt: skip
def test_schedules_warm_up_and_then_take_their_shape(tmp_path, schedule, middle):
    config = recipe(tmp_path, schedule=schedule, steps=110, warmup=10, learning_rate=1.0, final_rate=0.1)  # fmt: skip
    rate = make_schedule(config)
    np.testing.assert_allclose([rate(i) for i in (0, 5, 10, 60)], [0, 0.5, 1, middle], rtol=1e-5)
    np.testing.assert_allclose(rate(110), 1.0 if schedule == "constant" else 0.1, rtol=1e-5)
    cold = make_schedule(dataclasses.replace(config, warmup=0))
    np.testing.assert_allclose(cold(0), 1.0)
    quarter = {"cosine": 0.1 + 0.9 * (1 + 2**-0.5) / 2, "linear": 0.775, "constant": 1.0}
    np.testing.assert_allclose(rate(35), quarter[schedule], rtol=1e-5)


def test_the_average_follows_the_parameters_and_forgets_the_first_ones_soon():
    rule = optax.chain(optax.sgd(1.0), keep_average(0.5))
    params = expected = jnp.array([1.0, 2.0])
    state = rule.init(params)
    for n in range(1, 9):
        updates, state = rule.update(jnp.array([1.0, -1.0]), state, params)
        params = optax.apply_updates(params, updates)
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * params
        np.testing.assert_allclose(trained_params(params, state), expected, rtol=1e-6)
    np.testing.assert_allclose(params, [-7.0, 10.0])


def test_an_average_is_what_is_exported_and_restored(tiny_setup, tmp_path):
    config, state = dataclasses.replace(tiny_setup.config, run=str(tmp_path), ema=0.9), begin(tiny_setup)  # fmt: skip
    opt_state = make_optimizer(config).init(state.params)
    twice = jax.tree.map(lambda x: 2 * x, state.params)
    opt_state = optax.tree.set(opt_state, average=twice)
    state = state.replace(opt_state=opt_state)
    assert leaves_equal(trained_params(state.params, state.opt_state), twice)
    expected = fold_scale(twice, state.feature_scale)
    draft = tiny_setup.module.config
    export(draft, state, tmp_path / "draft")
    exported = load_draft(tmp_path / "draft", TARGET, dtype=jnp.bfloat16).params
    assert leaves_equal(exported, jax.tree.map(lambda x: x.astype(jnp.bfloat16), expected))
    with open_checkpoints(config) as checkpoints:
        checkpoints.save(3, state, custom_metadata={"draft": plain(draft)})
    assert leaves_equal(read_draft(tmp_path).params, expected)
