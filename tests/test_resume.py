"""Runs that are killed or asked to end, in processes of their own, against runs in one go."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from fakes import simulated
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as ocp
from runs import recipe, records, timeless, toml

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
OPTIONS = dict(steps=10, save_every=1, evaluate_every=5, ema=0.9, optimizer="muon", mixture={"kl_divergence": 1.0})  # fmt: skip


@pytest.fixture(scope="module")
def start(store, tmp_path_factory):
    """Runs the tiny recipe in a folder, in a process that finds the compiled programs of earlier ones."""
    cache = tmp_path_factory.mktemp("programs")

    def start(run: Path, *options: str, devices: int = 1):
        file = run.with_suffix(".toml")
        file.write_text(toml(recipe(run, **OPTIONS)))
        command = [sys.executable, str(ROOT / "tests/tiny_run.py"), str(store), str(file), *options]
        env = {
            **os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "XLA_FLAGS": simulated(devices),
        }  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, env=env)

    return start


@pytest.fixture(scope="module")
def straight_run(start, tmp_path_factory):
    """Ten steps in one go."""
    run = tmp_path_factory.mktemp("runs") / "straight"
    done = start(run)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def killed_run(start, straight_run):
    """Five steps, and killed by SIGKILL while the sixth is being saved."""
    run = straight_run.with_name("killed")
    done = start(run, "die-in-save=6")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert latest(run) == 5
    assert len(records(run)) == 6, "the step had been recorded"
    names = {p.name for p in (run / "checkpoints").iterdir()}
    assert len(names) == 3, f"the killed save left nothing, it was too early: {names}"
    return run


def latest(run: Path) -> int:
    return max(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdecimal())


def state_of(run: Path):
    """Everything in the last checkpoint, on one device, whatever devices wrote it."""
    folder, here = str(run / "checkpoints/10"), SingleDeviceSharding(jax.devices()[0])
    stored = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
        ocp.metadata(folder).metadata,
    )
    return ocp.load(folder, stored)


def compare(a: Path, b: Path, close) -> None:
    """Checkpoints, metrics and, where they must be the same bits, exports of two finished runs."""
    x, y = state_of(a), state_of(b)
    assert {"average", "mu", "params"} <= set(re.findall(r"\w+", str(jax.tree.structure(x))))
    jax.tree.map(close, x, y)
    assert [r["step"] for r in records(b)] == list(range(1, 11))
    if close is np.testing.assert_array_equal:
        assert timeless(records(a)) == timeless(records(b))
        drafts = [(run / "draft/model.safetensors").read_bytes() for run in (a, b)]
        assert drafts[0] == drafts[1]


def test_a_run_killed_during_a_save_goes_on_bit_for_bit(start, straight_run, killed_run):
    run = Path(shutil.copytree(killed_run, killed_run.with_name("resumed")))
    done = start(run)
    assert done.returncode == 0, done.stderr
    compare(straight_run, run, np.testing.assert_array_equal)
    assert all(p.name.isdecimal() for p in (run / "checkpoints").iterdir())


@pytest.mark.deep
def test_the_second_half_may_run_on_another_number_of_devices(start, straight_run, killed_run):
    run = Path(shutil.copytree(killed_run, killed_run.with_name("devices")))
    done = start(run, "mesh={fsdp=2, model=2}", devices=4)
    assert done.returncode == 0, done.stderr
    assert len(records(run)) == 10

    def close(x, y):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)

    compare(straight_run, run, close)


@pytest.mark.parametrize(
    ("name", "code"), [("SIGTERM", 143), pytest.param("SIGINT", 130, marks=pytest.mark.deep)]
)
def test_a_signal_lets_the_step_end_saves_it_and_exits(start, straight_run, name, code):
    run = straight_run.with_name(name)
    done = start(run, f"signals=4:{name}", "save_every=100")
    assert done.returncode == code, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "interrupted" in line]
    assert line == f"interrupted by {name} after step 4, which is saved; the same command goes on"
    assert latest(run) == 4
    assert len(records(run)) == 4
    done = start(run, "save_every=100")
    assert done.returncode == 0, done.stderr
    compare(straight_run, run, np.testing.assert_array_equal)


def test_a_second_signal_ends_the_run_at_once(start, straight_run):
    run = straight_run.with_name("twice")
    done = start(run, "signals=4:SIGTERM,SIGTERM")
    assert done.returncode == -signal.SIGTERM
    assert latest(run) == 3
    assert len(records(run)) == 3
