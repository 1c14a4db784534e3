import jax
import jax.numpy as jnp
import numpy as np
import optax
from runs import begin

from train.inputs import make_step_input
from train.losses import Objective
from train.optimizer import make_optimizer
from train.step import train_step


def test_float32_masters_keep_a_thousand_updates_of_1e_5(straight):
    """In bfloat16 a weight of 1 would never move."""
    constant = optax.stateless(lambda u, p: jax.tree.map(lambda x: jnp.full_like(x, 1e-5), u))
    state = begin(straight)
    state = state.replace(opt_state=constant.init(state.params))
    blocks, ids = make_step_input(straight, 0)
    before = np.asarray(state.params["hidden_norm"]["weight"])
    for _ in range(1000):
        state, _ = train_step(
            state, straight.embedding, jnp.asarray(ids), blocks, module=straight.module, optimizer=constant,
            objective=Objective(), chunk=64, head=straight.head,
        )  # fmt: skip
    moved = np.asarray(state.params["hidden_norm"]["weight"]) - before
    np.testing.assert_allclose(moved, 1e-2, rtol=1e-2)
    assert int(state.step) == 1000


def test_a_frozen_norm_does_not_decay_and_a_matrix_does(straight):
    params = {"norm": jnp.ones(3), "matrix": jnp.ones((2, 2))}
    optimizer = make_optimizer(straight.config)
    state = optimizer.init(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for _ in range(3):
        updates, state = optimizer.update(zeros, state, params)
    assert not np.asarray(updates["norm"]).any()
    assert np.all(np.asarray(updates["matrix"]) < 0)
