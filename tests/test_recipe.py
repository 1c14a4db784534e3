from pathlib import Path

import pytest

from train.checkpoints import measured
from train.config import TrainConfig, read_recipe
from train.prompts import EVALUATION_FILES
from train.setup import held_out_files

RECIPES = Path(__file__).parent.parent / "train/recipes"
RECIPE = RECIPES / "smollm2.toml"


def write(tmp_path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_the_recipe_of_the_embedded_draft_is_read():
    config = read_recipe(RECIPE)
    assert config.target_layer_ids == (1, 8, 14, 20, 27)
    assert config.block_size == 8


def test_recipes_for_comparison_differ_in_objective_and_optimizer_alone():
    own = vars(read_recipe(RECIPES / "smollm2-third.toml", ["init=", "steps=1100"]))
    rule = {
        "run", "head", "mixture", "gamma", "b2", "schedule", "warmup", "learning_rate", "final_rate", "weight_decay",
        "base_ratio", "weights", "dpace_alpha", "normalize",
    }  # fmt: skip
    for name in ("speculators", "nemo"):
        other = vars(read_recipe(RECIPES / f"smollm2-{name}.toml", ["init="]))
        assert {k for k in own if own[k] != other[k]} <= rule
        assert other["learning_rate"] != own["learning_rate"]


def test_overrides_stand_above_the_file_and_are_toml(tmp_path):
    path = write(tmp_path, 'run = "a"\nsteps = 500\nprompts = {chat = 5, math = 5}\n')
    config = read_recipe(
        path, ["steps=700", 'run="b"', "target_layer_ids=[2, 3]", "gamma=7", "prompts={code=2}"]
    )
    assert (config.run, config.steps, config.target_layer_ids, config.gamma) == ("b", 700, (2, 3), 7)  # fmt: skip
    assert read_recipe(path, ["run=runs/my run", "optimizer=muon"]).run == "runs/my run"
    assert config.prompts == {"code": 2}


def test_an_override_of_one_entry_leaves_the_others_of_its_table(tmp_path):
    path = write(tmp_path, 'run = "a"\nprompts = {chat = 5, math = 6}\n')
    config = read_recipe(path, ["prompts.chat=10", "mixture.kl_divergence=0.5"])
    assert config.prompts == {"chat": 10, "math": 6}
    assert config.mixture == {"cross_entropy": 1.0, "kl_divergence": 0.5}
    with pytest.raises(ValueError, match="steps="):
        read_recipe(path, ["steps.x=5"])
    with pytest.raises(ValueError, match=r"unknown keys prompt \(did you mean prompts\?\)"):
        read_recipe(path, ["prompt.chat=10"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stepps = 5", r"unknown keys stepps \(did you mean steps\?\)"),
        ("qqq = 5", "unknown keys qqq$"),
        ("target_layer_ids = [1, 1]", "target_layer_ids=.* must be a list of different layers"),
        ("max_new_tokens = 255", "response_size=256 leaves no room before self.max_new_tokens=255"),
        ("sequence_size = 8", "sequence_size=8 must be more than self.block_size=8"),
        ('optimizer = "sgd"', "optimizer='sgd' must be adamw or muon"),
        ('schedule = "step"', "schedule='step' must be cosine or linear or constant"),
        ("ema = 1.0", r"ema=1\.0 must be less than 1"),
        ("muon_momentum = 1.0", r"muon_momentum=1\.0 must be less than 1"),
        ("decode_every = -1", "decode_every=-1 must be an integer, at least 0"),
        ("decode_prompts = 0", "decode_prompts=0 must be an integer, at least 1"),
        ("keep = 0", "keep=0 must be an integer, at least 1"),
        ("steps = 0", "steps=0 must be an integer, at least 1"),
        ("steps = 10.0", r"steps=10\.0 must be an integer"),
        ("steps = true", "steps=True"),
        ("seed = -1", "seed=-1"),
        ("block_size = 1", "block_size=1 must be an integer, at least 2"),
        ('learning_rate = "fast"', "learning_rate='fast'"),
        ("learning_rate = 0", "learning_rate=0 must be a positive number"),
        ("gamma = 0", "gamma=0"),
        ("clip = nan", "clip=nan"),
        ("b2 = 1.0", r"b2=1\.0 must be less than 1"),
        ("target_layer_ids = 3", "target_layer_ids=3 must be a list of different layers"),
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
    path = write(tmp_path, 'run = "r"\n')
    with pytest.raises(ValueError, match="'steps' is no key=value"):
        read_recipe(path, ["steps"])
    with pytest.raises(ValueError, match=r"target_layer_ids='\[1,' must be a list"):
        read_recipe(path, ["target_layer_ids=[1,"])


def test_a_recipe_names_its_own_held_out_prompts_and_the_first_file_ranks(tmp_path):
    mine, more = tmp_path / "mine.jsonl", tmp_path / "more.jsonl"
    for path in (mine, more):
        path.write_text('{"text": "Hello"}\n')
    files = (str(mine), str(more))
    assert held_out_files(TrainConfig(run="", held_out=files)) == [mine, more]
    assert held_out_files(TrainConfig(run="")) == list(EVALUATION_FILES)
    record = {"step": 3, "acceptance_length": {"mine": 2.0, "more": 3.0}, "decoded": {"mine": 1.5}}
    assert measured(record) == {"acceptance_length": 2.0, "decoded": 1.5}
    assert measured({"step": 4, "loss": 1.0}) is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("absent.jsonl",), r"held_out names \['.*absent.jsonl'\], which are no files"),
        (("mine.jsonl", "other/mine.jsonl"), r"held_out=\['mine', 'mine'\] must differ"),
        (("draft.jsonl",), r"held_out=\['draft'\] must differ from each other and from \['checkpoints'"),
    ],
)  # fmt: skip
def test_held_out_files_that_are_missing_or_share_a_folder_are_refused(tmp_path, names, message):
    (tmp_path / "other").mkdir()
    for name in ("mine.jsonl", "other/mine.jsonl", "draft.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=message):
        held_out_files(TrainConfig(run="", held_out=tuple(str(tmp_path / n) for n in names)))
