import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fakes import leaves_equal, prompts_of
from training import TAPS, answers, tiny_target

import train.run
from dflash_jax.checkpoint import keys, orbax
from dflash_jax.generation import generate
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.pair import load_draft
from train import draft, restore
from train.config import TrainConfig, read_recipe
from train.data import frequent_ids
from train.draft import draft_config, export
from train.inputs import make_step_input
from train.losses import Objective
from train.optimizer import make_optimizer
from train.restore import read_draft
from train.run import keep_recipe
from train.setup import Setup
from train.step import block_hidden, train_step
from train.store import load_examples, write_shard
from train.warm_start import feature_scale, fold_scale, random_params, warm_start

RECIPE = Path(__file__).parent.parent / "train/recipes/smollm2.toml"
TARGET = tiny_target()
LAST = TARGET.config.num_hidden_layers - 1
PROMPTS = prompts_of(3, 9, 6, 12, seed=8)


def begin(setup: Setup):
    return draft.first_state(
        setup.config, setup.target, setup.module.config, setup.optimizer, setup.examples
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A folder of two shards: four answers of the tiny target."""
    folder = tmp_path_factory.mktemp("responses")
    examples = answers(TARGET, PROMPTS, 20, (*TAPS, LAST))
    examples = [e for e in examples if len(e.tokens) - e.prompt_length > 3]
    assert len(examples) >= 3
    write_shard(folder, 0, examples[:2], (*TAPS, LAST))
    write_shard(folder, 1, examples[2:], (*TAPS, LAST))
    return folder


def recipe(run, **options) -> TrainConfig:
    defaults = dict(
        target_layer_ids=TAPS, num_hidden_layers=1, block_size=4, mask_token_id=63, batch_size=2, anchors=6,
        sequence_size=32, response_size=16, frequent=8, candidates=64, chunk=20, steps=6, warmup=2, learning_rate=3e-3,
        evaluate_every=3, save_every=2,
    )  # fmt: skip
    return TrainConfig(run=str(run), **(defaults | options))


def set_up(store, run, **options) -> Setup:
    """A setup as a new process would make it: nothing is shared with another."""
    Path(run).mkdir(parents=True, exist_ok=True)
    config = recipe(run, **options)
    target = tiny_target()
    taps = (*TAPS, LAST) if config.objective.needs_teacher else TAPS
    examples = load_examples(store, taps)
    held_out = {"held_out": load_examples(store, TAPS)[:2]}
    module = DFlashDraftModel(draft_config(target, config))
    frequent = frequent_ids(examples, config.frequent)
    return Setup(config, target, module, make_optimizer(config), examples, held_out, frequent)


def checkpoint(setup: Setup, step: int):
    from orbax.checkpoint import v1 as ocp

    with ocp.training.Checkpointer((Path(setup.config.run) / "checkpoints").absolute()) as c:
        return c.load(step, begin(setup))


def records(run) -> list[dict]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(store, tmp_path_factory):
    """Six steps in one go."""
    setup = set_up(store, tmp_path_factory.mktemp("straight"))
    train.run.train(setup)
    return setup


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
    train_until(set_up(store, tmp_path), 3, monkeypatch)
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]
    resumed = set_up(store, tmp_path)
    train.run.train(resumed)
    a, b = checkpoint(straight, 6), checkpoint(resumed, 6)
    assert int(a.step) == int(b.step) == 6
    assert leaves_equal(a, b)
    assert not leaves_equal(a.params, checkpoint(straight, 4).params)
    timeless = [[{k: v for k, v in r.items() if k != "labels_per_second"} for r in records(s.config.run)] for s in (straight, resumed)]  # fmt: skip
    assert timeless[0] == timeless[1]
    drafts = [(Path(s.config.run) / "draft/model.safetensors").read_bytes() for s in (straight, resumed)]  # fmt: skip
    assert drafts[0] == drafts[1]


def test_a_finished_run_has_nothing_left_to_do(store, straight):
    before = (Path(straight.config.run) / "metrics.jsonl").read_bytes()
    train.run.train(set_up(store, straight.config.run))
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


def test_only_the_two_latest_checkpoints_are_kept(straight):
    names = sorted(p.name for p in (Path(straight.config.run) / "checkpoints").iterdir())
    assert names == ["4", "6"]


def test_half_a_line_at_the_end_of_the_metrics_is_forgotten(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "acceptance_length": {"held_out": a}} for s, a in ((1, 1.5), (2, 2.5), (3, 3.5))]  # fmt: skip
    file.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 4, "lo')
    assert train.run._forget_later(file, 2) == 2.5
    assert [r["step"] for r in records(tmp_path)] == [1, 2]
    assert train.run._forget_later(tmp_path / "absent.jsonl", 0) == 0.0


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


def test_the_exported_draft_loads_and_decodes_like_the_target_alone(store, straight):
    draft = load_draft(Path(straight.config.run) / "draft", TARGET)
    assert draft.config == straight.module.config
    options = dict(max_new_tokens=15)
    plain = generate(TARGET, None, PROMPTS, **options)
    drafted = generate(TARGET, draft, PROMPTS, **options)
    assert drafted.tokens == plain.tokens
    assert drafted.finish == plain.finish


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
    with pytest.raises(ValueError, match=r"steps \[4, 6\], not step=5"):
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
    wrong = set_up(store, tmp_path / "run", init=str(folder), block_size=3)
    with pytest.raises(ValueError, match="init="):
        begin(wrong)


def test_the_feature_scale_is_one_over_the_rms_without_first_and_last_position(store):
    examples = load_examples(store, TAPS)
    rows = np.concatenate([e.features[1:-1] for e in examples])
    np.testing.assert_allclose(feature_scale(examples) * np.sqrt((rows**2).mean(axis=0)), 1, rtol=1e-5)  # fmt: skip
    spiked = [dataclasses.replace(e, features=e.features[:].copy()) for e in examples]
    for e in spiked:
        e.features[0] *= 1e3
    np.testing.assert_allclose(feature_scale(spiked), feature_scale(examples), rtol=1e-5)


def test_a_warm_start_passes_the_last_tap_through_fc(straight):
    state = begin(straight)
    features = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    through = state.params["fc"]["weight"] @ (features * state.feature_scale)
    np.testing.assert_allclose(through, features[-32:], rtol=1e-5, atol=1e-6)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))


def test_a_warm_start_needs_layers_of_the_targets_shape(straight):
    config = dataclasses.replace(straight.module.config, intermediate_size=40)
    params = random_params(config, jax.random.key(0))
    with pytest.raises(ValueError, match="shape"):
        warm_start(params, TARGET.params, config, np.ones(64), straight.examples)


def test_training_leaves_the_target_alone(store, straight):
    assert leaves_equal(straight.target.params, tiny_target().params)


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
        state, metrics = train.run.one_step(setup, state, 0)
        assert (metrics["rows_without_anchors"], metrics["labels"]) == (empty, labels)
        assert (metrics["loss"] > 0) == (metrics["gradient_norm"] > 0) == (labels > 0)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


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


def test_a_steps_input_depends_on_the_step_alone(store, straight):
    other = set_up(store, straight.config.run)
    (a, ids_a), (b, ids_b), (c, _) = (make_step_input(s, n) for s, n in ((straight, 4), (other, 4), (other, 5)))  # fmt: skip
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


def test_a_recipe_with_visible_prefixes_has_the_same_anchors_and_fewer_labels(store, straight):
    other = set_up(store, straight.config.run, prefix_base=0.9)
    plain, shown = (make_step_input(setup, 0)[0] for setup in (straight, other))
    np.testing.assert_array_equal(shown.anchors, plain.anchors)
    assert set(np.unique(shown.first)) == {2, 3}
    assert set(np.unique(plain.first)) == {1}
    slot = np.arange(4)[None, None]
    np.testing.assert_array_equal(shown.counts, plain.counts & (slot >= shown.first[:, :, None]))


def test_a_frozen_norm_does_not_decay_and_a_matrix_does(straight):
    params = {"norm": jnp.ones(3), "matrix": jnp.ones((2, 2))}
    optimizer = make_optimizer(straight.config)
    state = optimizer.init(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for _ in range(3):
        updates, state = optimizer.update(zeros, state, params)
    assert not np.asarray(updates["norm"]).any()
    assert np.all(np.asarray(updates["matrix"]) < 0)


# Recipes.


def write(tmp_path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_the_recipe_of_the_embedded_draft_is_read():
    config = read_recipe(RECIPE)
    assert config.target_layer_ids == (1, 8, 14, 20, 27)
    assert config.block_size == 8


def test_overrides_stand_above_the_file_and_are_toml(tmp_path):
    path = write(tmp_path, 'run = "a"\nsteps = 500\nprompts = {chat = 5, math = 5}\n')
    config = read_recipe(
        path, ["steps=700", 'run="b"', "target_layer_ids=[2, 3]", "gamma=7", "prompts={code=2}"]
    )
    assert (config.run, config.steps, config.target_layer_ids, config.gamma) == ("b", 700, (2, 3), 7)  # fmt: skip
    assert config.prompts == {"code": 2}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stepps = 5", "unknown keys stepps"),
        ("steps = 0", "steps=0 must be an integer, at least 1"),
        ("steps = 10.0", r"steps=10\.0 must be an integer"),
        ("steps = true", "steps=True"),
        ("seed = -1", "seed=-1"),
        ("seed = 4294967296", r"seed=4294967296 must be less than 2\*\*32"),
        ("block_size = 1", "block_size=1 must be an integer, at least 2"),
        ('learning_rate = "fast"', "learning_rate='fast'"),
        ("learning_rate = 0", "learning_rate=0 must be a positive number"),
        ("gamma = 0", "gamma=0"),
        ("clip = nan", "clip=nan"),
        ("b2 = 1.0", r"b2=1\.0 must be less than 1"),
        ("target_layer_ids = 3", "target_layer_ids=3 must be a list of layers"),
        ("target_layer_ids = [1, -1]", "target_layer_ids"),
        ("mixture = {l2 = 1.0}", "mixture=.*cross_entropy"),
        ("mixture = {}", "mixture"),
        ("mixture = {cross_entropy = -1.0}", "mixture=.* positive"),
        ("mixture = 3", "mixture=3"),
        ('weights = "dpacee"', "weights='dpacee' must be of .*'dpace'"),
        (
            'weights = "dpace"\nmixture = {kl_divergence = 1}',
            "weights='dpace' needs one of .*'cross_entropy'",
        ),
        ('normalize = "mean"', "normalize='mean' must be of .*'count'"),
        ("dpace_alpha = 1.5", r"dpace_alpha=1\.5 must be at most 1"),
        ("dpace_alpha = -0.5", r"dpace_alpha=-0\.5 must be a non-negative number"),
        ("temperature = inf", "temperature=inf must be a positive number"),
        ("mixture = {cross_entropy = inf}", "mixture=.* positive"),
        ("temperature = 0", "temperature=0 must be a positive number"),
        ("prefix_base = -1", "prefix_base=-1 must be a non-negative number"),
        ("prompts = {poems = 3}", "prompts"),
        (
            "frequent = 100\ncandidates = 50",
            r"self.candidates=50 must be at least self.frequent=100 and",
        ),
        ("steps = 20\nwarmup = 20", "warmup=20 must be less than self.steps=20"),
        ("rows = 20", "rows=20 must be a multiple of self.refill=16"),
        ("target = 4", "target=4 must be a string"),
        ("steps = ", "recipe .*recipe.toml"),
    ],
)
def test_a_bad_recipe_is_one_error_that_names_the_key(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read_recipe(write(tmp_path, f'run = "r"\n{line}\n'))


def test_a_recipe_without_a_run_or_a_readable_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="run, the folder of the run, is missing"):
        read_recipe(write(tmp_path, "steps = 500\n"))
    with pytest.raises(ValueError, match=r"absent\.toml"):
        read_recipe(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.toml"):
        read_recipe(tmp_path / "binary.toml")
    with pytest.raises(ValueError, match="recipe"):
        read_recipe(write(tmp_path, 'run = "r"\n'), ["steps"])


def test_a_run_is_not_gone_on_with_under_another_recipe(tmp_path):
    keep_recipe(recipe(tmp_path / "run"))
    keep_recipe(recipe(tmp_path / "run", save_every=5))
    with pytest.raises(ValueError, match="another steps, warmup"):
        keep_recipe(recipe(tmp_path / "run", steps=7, warmup=1))
    kept = json.loads((tmp_path / "run/recipe.json").read_text())
    del kept["weights"]  # written before there were any
    (tmp_path / "run/recipe.json").write_text(json.dumps(kept))
    keep_recipe(recipe(tmp_path / "run"))


def test_the_command_ends_with_1_and_one_line_for_a_missing_recipe(tmp_path):
    command = [sys.executable, "-m", "train.run", str(tmp_path / "missing.toml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=RECIPE.parents[2])
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "missing.toml" in done.stderr
