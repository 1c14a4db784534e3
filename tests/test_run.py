import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import leaves_equal
from runs import (
    TARGET,
    begin,
    checkpoint,
    elsewhere,
    events,
    recipe,
    records,
    scalars_of,
    set_up,
    timeless,
    toml,
)
from training import tiny_target

import train.run
from dflash_jax.checkpoint import keys, orbax
from dflash_jax.pair import load_draft
from train import restore
from train.checkpoints import NOT_RANKED, find_checkpoint, measured, rank
from train.draft import export
from train.inputs import make_step_input
from train.restore import read_draft
from train.run import keep_recipe
from train.step import block_hidden
from train.warm_start import fold_scale

ROOT = Path(__file__).parent.parent


class Killed(BaseException):
    """Ends a run as a signal would."""


def in_step(step: int, act, monkeypatch):
    """Has `act` called while a step is in flight."""

    def acting(setup, number):
        if number == step - 1:
            act()
        return make_step_input(setup, number)

    monkeypatch.setattr(train.run, "make_step_input", acting)


def same_end(a, b) -> bool:
    """Whether two finished runs left the same."""
    assert leaves_equal(checkpoint(a, 6), checkpoint(b, 6))
    assert timeless(records(a.config.run)) == timeless(records(b.config.run))
    for file in ("samples.jsonl", "draft/model.safetensors"):
        left, right = ((Path(s.config.run) / file).read_bytes() for s in (a, b))
        assert left == right != b""
    return True


def test_a_resumed_run_is_the_straight_run_bit_for_bit(straight, tmp_path, monkeypatch):
    """Killed after step 3: step 3, evaluation and export included, comes twice."""

    def kill():
        raise Killed

    in_step(4, kill, monkeypatch)
    setup = elsewhere(straight, tmp_path)
    with pytest.raises(Killed):
        train.run.train(setup)
    monkeypatch.undo()
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]
    train.run.train(setup)
    assert same_end(straight, setup)
    assert not leaves_equal(checkpoint(setup, 6).params, checkpoint(setup, 4).params)


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.deep)])
def test_a_signal_lets_the_step_end_saves_it_and_exits(
    straight, tmp_path, monkeypatch, name, capsys
):
    """In step 5, which is neither evaluated nor to be saved."""
    number = signal.Signals[name]
    before = signal.getsignal(number)
    in_step(5, lambda: os.kill(os.getpid(), number), monkeypatch)
    monkeypatch.setattr(train.run, "prepare", lambda config, mesh: elsewhere(straight, config.run))
    setup, file = elsewhere(straight, tmp_path), tmp_path / "recipe.toml"
    file.write_text(toml(setup.config))
    assert train.run.main([str(file)]) == 128 + number
    line = f"interrupted by {name} after step 5, which is saved; the same command goes on"
    assert line in capsys.readouterr().err.splitlines()
    assert signal.getsignal(number) is before
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3, 4, 5]
    monkeypatch.setattr(train.run, "make_step_input", make_step_input)
    assert train.run.main([str(file)]) == 0
    assert same_end(straight, setup)


def test_a_signal_before_the_first_step_ends_the_preparation_at_once(tmp_path, monkeypatch, capsys):
    file = tmp_path / "recipe.toml"
    file.write_text(toml(recipe(tmp_path / "run")))

    def prepare(config, mesh):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        raise AssertionError("went on")

    monkeypatch.setattr(train.run, "prepare", prepare)
    assert train.run.main([str(file)]) == 143
    assert capsys.readouterr().err == "interrupted by SIGTERM; the same command goes on\n"


def test_a_finished_run_has_nothing_left_to_do(straight):
    before = (Path(straight.config.run) / "metrics.jsonl").read_bytes()
    train.run.train(straight)
    assert (Path(straight.config.run) / "metrics.jsonl").read_bytes() == before


def test_every_step_is_in_the_metrics_with_its_numbers(straight):
    rows = records(straight.config.run)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    for r in rows:
        assert {"loss", "accuracy", "gradient_norm", "labels", "labels_per_second"} <= r.keys()
        assert r["loss"] > 0
        assert r["labels"] > 0
    assert [r["step"] for r in rows if "acceptance_length" in r] == [3, 6]
    assert all(1 <= r["acceptance_length"]["held_out"] <= 4 for r in rows if "acceptance_length" in r)  # fmt: skip


def test_rows_without_an_anchor_are_counted_and_do_no_harm(straight):
    whole = straight.examples[0]
    masked = dataclasses.replace(whole, supervised=np.zeros(len(whole.tokens), bool))
    end = whole.prompt_length + 2  # shorter than a block: one anchor, one label
    short = dataclasses.replace(
        whole, tokens=whole.tokens[:end], supervised=whole.supervised[:end], features=whole.features[:end]
    )  # fmt: skip
    state = begin(straight)
    for examples, empty, labels in (([masked, short], 1, 1), ([masked] * 2, 2, 0)):
        setup = dataclasses.replace(straight, examples=examples)
        with jax.set_mesh(setup.mesh):
            state, metrics = train.run.one_step(setup, state, 0)
        assert (metrics["rows_without_anchors"], metrics["labels"]) == (empty, labels)
        assert (metrics["loss"] > 0) == (metrics["gradient_norm"] > 0) == (labels > 0)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_a_loss_that_is_no_number_ends_the_run(straight):
    state = begin(straight)
    broken = state.replace(feature_scale=state.feature_scale * np.nan)
    with pytest.raises(ValueError, match="step 1: loss=nan and gradient_norm=nan are no numbers"):
        train.run.one_step(straight, broken, 0)


def test_a_runs_events_are_its_metrics(straight):
    run = Path(straight.config.run)
    rows = records(run)
    names = {name for name, _, _ in events(run / "tensorboard")}
    assert {"loss", "learning_rate", "decoded/held_out", "gap/held_out"} <= names
    assert not {"step", "time"} & names
    assert events(run / "tensorboard") == scalars_of(rows)


def test_the_latest_checkpoints_and_the_best_are_kept_and_found_by_name(
    straight, tmp_path, monkeypatch
):
    """Acceptance falls from step 2 on: the best is neither of the latest two."""
    scores = iter((3.0, 2.0, 1.5))
    monkeypatch.setattr(train.run, "teacher_forced", lambda *_: next(scores))
    setup = elsewhere(straight, tmp_path, decode_every=0, evaluate_every=2, save_every=1)
    train.run.train(setup)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["2", "5", "6"]
    assert [find_checkpoint(tmp_path, n).name for n in ("best", "latest", 5)] == ["2", "6", "5"]
    exported, best = load_draft(tmp_path / "draft", TARGET), read_draft(tmp_path, "best")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), best.params)
    assert leaves_equal(exported.params, rounded)
    with pytest.raises(ValueError, match="not second"):
        find_checkpoint(tmp_path, "second")


def test_the_best_is_the_best_decoded_one_where_one_was_decoded():
    forced, decoded = {"acceptance_length": 5.0}, {"acceptance_length": 5.0, "decoded": 2.0}
    assert rank(decoded) > rank(forced) > NOT_RANKED
    assert rank(decoded) < rank({"acceptance_length": 1.0, "decoded": 2.1})
    record = {"acceptance_length": {"held_out": 2.0, "gsm8k": 9.0}, "decoded": {"gsm8k": 3.0}}
    assert measured(record) == {"acceptance_length": 2.0}
    assert measured({"loss": 1.0}) is None


def test_the_loss_falls_on_a_set_that_can_be_learnt_by_heart(store, tmp_path):
    setup = set_up(
        store, tmp_path, steps=150, learning_rate=1e-2, evaluate_every=150, save_every=1000,
        mixture={"cross_entropy": 0.5, "kl_divergence": 0.5},
    )  # fmt: skip
    train.run.train(setup)
    rows = records(tmp_path)
    first, last = (np.mean([r["loss"] for r in part]) for part in (rows[:5], rows[-5:]))
    assert last < 0.4 * first
    assert rows[-1]["accuracy"] > 0.7
    assert rows[-1]["acceptance_length"]["held_out"] > 2


def test_an_export_takes_the_place_of_an_older_one_and_a_failed_one_leaves_it(straight, tmp_path):
    state, folder = checkpoint(straight, 6), tmp_path / "draft"
    older = checkpoint(straight, 4)
    export(straight.module.config, older, folder)
    before = (folder / "model.safetensors").read_bytes()
    bad = jax.tree.map(jnp.asarray, state.params) | {"fc": {"weight": jnp.full((32, 64), jnp.nan)}}
    with pytest.raises(ValueError, match=r"fc\.weight|fc/weight"):
        export(straight.module.config, state.replace(params=bad), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    (tmp_path / "draft.new").mkdir()  # of an export that was killed
    export(straight.module.config, state, folder)
    assert (folder / "model.safetensors").read_bytes() != before
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]
    folded = fold_scale(state.params, state.feature_scale)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), folded)
    assert leaves_equal(load_draft(folder, TARGET, dtype=jnp.bfloat16).params, rounded)


def test_a_checkpoints_draft_is_read_without_the_optimizers_state(straight, tmp_path, monkeypatch):
    asked, read = set(), orbax.read_leaves
    monkeypatch.setattr(
        orbax, "read_leaves", lambda f, wanted: asked.update(wanted) or read(f, wanted)
    )
    for step in (4, 6):
        state = checkpoint(straight, step)
        draft = read_draft(straight.config.run, step)
        assert draft.config == straight.module.config
        assert leaves_equal(draft.params, fold_scale(state.params, state.feature_scale))
    assert asked == {f"params/{p}" for p in keys.flatten(state.params)} | {"feature_scale"}
    assert leaves_equal(read_draft(straight.config.run).params, draft.params)
    assert restore.main([straight.config.run, str(tmp_path / "draft")]) == 0
    export(straight.module.config, state, tmp_path / "other")
    weights = [(tmp_path / p / "model.safetensors").read_bytes() for p in ("draft", "other")]
    assert weights[0] == weights[1]


def test_a_run_without_the_checkpoint_says_which_it_has(straight, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"steps \[4, 6\], not 5"):
        read_draft(straight.config.run, 5)
    assert restore.main([str(tmp_path), str(tmp_path / "draft")]) == 1
    assert "steps []" in capsys.readouterr().err


def test_the_folded_draft_on_raw_features_is_the_trained_one_on_scaled_features(straight):
    state = checkpoint(straight, 6)
    assert float(jnp.abs(state.feature_scale - 1).max()) > 0.1
    blocks, _ = make_step_input(straight, 0)
    hidden = functools.partial(jax.jit(block_hidden, static_argnums=0), straight.module)
    trained = hidden(state.params, straight.embedding, state.feature_scale, blocks)
    folded = fold_scale(state.params, state.feature_scale)
    raw = hidden(folded, straight.embedding, jnp.ones_like(state.feature_scale), blocks)
    np.testing.assert_allclose(raw, trained, atol=1e-5)


def test_a_run_can_start_from_a_draft(straight, store, tmp_path):
    folder = tmp_path / "draft"
    export(straight.module.config, checkpoint(straight, 6), folder)
    setup = set_up(store, tmp_path / "run", init=str(folder))
    state = begin(setup)
    folded = fold_scale(state.params, state.feature_scale)
    given = load_draft(folder, TARGET, dtype=jnp.float32).params
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-8), folded, given)
    with pytest.raises(
        ValueError, match=r"init=.* has block_size=4, but the recipe says block_size=3"
    ):
        set_up(store, tmp_path / "run", init=str(folder), block_size=3)


def test_training_leaves_the_target_alone(store, straight):
    assert leaves_equal(straight.target.params, tiny_target().params)


def test_a_run_is_not_gone_on_with_under_another_recipe(tmp_path):
    keep_recipe(recipe(tmp_path / "run", steps=8))  # and nothing was made with it
    keep_recipe(recipe(tmp_path / "run"))
    (tmp_path / "run/prompts.jsonl").touch()
    keep_recipe(recipe(tmp_path / "run", save_every=5))
    with pytest.raises(ValueError, match="another steps, warmup"):
        keep_recipe(recipe(tmp_path / "run", steps=7, warmup=1))
    kept = json.loads((tmp_path / "run/recipe.json").read_text())
    del kept["weights"]  # written before there were any
    (tmp_path / "run/recipe.json").write_text(json.dumps(kept))
    keep_recipe(recipe(tmp_path / "run"))


def test_the_command_ends_with_1_and_one_line_for_a_missing_recipe(tmp_path):
    command = [sys.executable, "-m", "train.run", str(tmp_path / "missing.toml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "missing.toml" in done.stderr
