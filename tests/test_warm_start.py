import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import random_params
from runs import TARGET, begin
from training import TAPS

from train.store import load_examples
from train.warm_start import feature_scale, warm_start


def test_the_feature_scale_is_one_over_the_rms_without_first_and_last_position(store):
    examples = load_examples(store, TAPS)
    rows = np.concatenate([e.features[1:-1] for e in examples])
    np.testing.assert_allclose(feature_scale(examples) * np.sqrt((rows**2).mean(axis=0)), 1, rtol=1e-5)  # fmt: skip
    spiked = [dataclasses.replace(e, features=e.features[:].copy()) for e in examples]
    for e in spiked:
        e.features[0] *= 1e3
    np.testing.assert_allclose(feature_scale(spiked), feature_scale(examples), rtol=1e-5)


def test_a_warm_start_passes_the_last_tap_through_fc(tiny_setup):
    state = begin(tiny_setup)
    features = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    through = state.params["fc"]["weight"] @ (features * state.feature_scale)
    np.testing.assert_allclose(through, features[-32:], rtol=1e-5, atol=1e-6)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))


def test_a_warm_start_needs_layers_of_the_targets_shape(tiny_setup):
    config = dataclasses.replace(tiny_setup.module.config, intermediate_size=40)
    params = random_params(config, 0)
    with pytest.raises(ValueError, match="shape"):
        warm_start(params, TARGET.params, config, np.ones(64), tiny_setup.examples)
