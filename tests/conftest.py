"""Settings that every test runs under."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_enable_compilation_cache", False)  # no test leans on an earlier run

MANY_MAPS = 10_000  # about 3 GB


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Drops compiled programs before they are too many: each is mapped memory, which a process may have 65,530 times."""
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of reference checkpoints and arrays."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Path:
    """Answers of the tiny target, as training examples on disk."""
    from runs import write_store

    return write_store(tmp_path_factory.mktemp("responses"))


@pytest.fixture(scope="session")
def tiny_setup(store, tmp_path_factory):
    """The setup of a run of six steps, which decodes at the last one."""
    from runs import set_up

    return set_up(store, tmp_path_factory.mktemp("setup"), decode_every=2)


@pytest.fixture(scope="session")
def straight(tiny_setup, tmp_path_factory):
    """That of a run which is done, in one go."""
    from runs import elsewhere

    import train.run

    setup = elsewhere(tiny_setup, tmp_path_factory.mktemp("straight"))
    train.run.train(setup)
    return setup
