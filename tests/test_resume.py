import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from fakes import leaves_equal
from runs import checkpoint, records, set_up, timeless

import train.run
from train.setup import Setup


class Killed(BaseException):
    """Ends a run as a signal would."""


def train_until(setup: Setup, step: int, monkeypatch, *, at: str = "make_step_input"):
    """Trains until `step` steps are done and the next one starts."""
    real = getattr(train.run, at)

    def kill(setup, number, *args):
        if number == step:
            raise Killed
        return real(setup, number, *args)

    monkeypatch.setattr(train.run, at, kill)
    with pytest.raises(Killed):
        train.run.train(setup)
    monkeypatch.undo()


def test_a_resumed_run_is_the_straight_run_bit_for_bit(store, straight, tmp_path, monkeypatch):
    """Killed after step 3: step 3, evaluation and export included, comes twice."""
    train_until(set_up(store, tmp_path, decode_every=2), 3, monkeypatch)
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]
    resumed = set_up(store, tmp_path, decode_every=2)
    train.run.train(resumed)
    a, b = checkpoint(straight, 6), checkpoint(resumed, 6)
    assert int(a.step) == int(b.step) == 6
    assert leaves_equal(a, b)
    assert not leaves_equal(a.params, checkpoint(straight, 4).params)
    runs = [s.config.run for s in (straight, resumed)]
    assert timeless(records(runs[0])) == timeless(records(runs[1]))
    samples = [(Path(run) / "samples.jsonl").read_bytes() for run in runs]
    assert samples[0] == samples[1] != b""
    drafts = [(Path(s.config.run) / "draft/model.safetensors").read_bytes() for s in (straight, resumed)]  # fmt: skip
    assert drafts[0] == drafts[1]


def test_a_finished_run_has_nothing_left_to_do(store, straight):
    before = (Path(straight.config.run) / "metrics.jsonl").read_bytes()
    train.run.train(set_up(store, straight.config.run))
    assert (Path(straight.config.run) / "metrics.jsonl").read_bytes() == before


SAVE_AND_DIE = """
import os, sys, threading
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp
import orbax.checkpoint._src.path.atomicity as atomicity

run, die = sys.argv[1], sys.argv[2] == "die"
policy = ocp.training.preservation_policies.LatestN(2)
with ocp.training.Checkpointer(run, preservation_policy=policy, cleanup_tmp_directories=True) as c:
    print("latest", None if c.latest is None else c.latest.step, flush=True)
    if not die:
        c.save(3, {"w": jnp.full((4,), 3.0)})
    else:
        # Killed after the arrays are on disk and before the step gets its name.
        for name in ("AtomicRenameTemporaryPath", "CommitFileTemporaryPath"):
            async def finalize(self, *a, **k):
                os.kill(os.getpid(), 9)
            getattr(atomicity, name).finalize = finalize
        c.save(6, {"w": jnp.full((4,), 6.0)})
        print("survived", flush=True)
"""


def test_a_kill_during_a_save_leaves_the_older_checkpoint_in_use(tmp_path):
    from orbax.checkpoint import v1 as ocp

    def process(mode):
        command = [sys.executable, "-c", SAVE_AND_DIE, str(tmp_path / "c"), mode]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        return subprocess.run(command, capture_output=True, text=True, env=env)

    first = process("live")
    assert first.returncode == 0, first.stderr
    second = process("die")
    assert second.returncode == -9, second.stdout + second.stderr
    assert "latest 3" in second.stdout
    assert len(list((tmp_path / "c").iterdir())) == 2, "the killed save left nothing: too early"
    with ocp.training.Checkpointer(tmp_path / "c", cleanup_tmp_directories=True) as c:
        assert c.latest.step == 3
        assert c.load(c.latest.step, {"w": jnp.zeros(4)})["w"].tolist() == [3.0] * 4
        c.save(6, {"w": jnp.full((4,), 7.0)})
        assert c.latest.step == 6
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["3", "6"]
