"""Settings that every test runs under."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of reference checkpoints and arrays."""
    return Path(__file__).parent / "golden"
