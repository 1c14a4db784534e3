"""Training on eight simulated devices, in one process or two, is training on one."""

import collections
import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from fakes import simulated
from meshes import AXES, CANDIDATES, VOCABULARY, decode, steps
from runs import LAST, recipe, records, set_up_recipe, toml
from training import TAPS, tiny_answers

from dflash_jax.checkpoint import keys
from dflash_jax.sharding import make_mesh
from train import run
from train.mesh import greatest, start
from train.restore import read_draft
from train.store import write_shard

ROOT = Path(__file__).parent.parent


def process(*command, devices: int, **more) -> subprocess.Popen:
    """A process of `meshes.py` on simulated devices; its code is compiled fast rather than well."""
    flags = f"{simulated(devices)} --xla_backend_optimization_level=0"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags} | more
    line = [sys.executable, "tests/meshes.py", *map(str, command)]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, cwd=ROOT, env=env, text=True, stdout=pipe, stderr=pipe)


def finish(*processes: subprocess.Popen) -> None:
    told = [p.communicate(timeout=500)[1] for p in processes]
    assert [p.returncode for p in processes] == [0] * len(processes), told[0][-3000:]


def close(a, b, **tolerance):
    np.testing.assert_allclose(np.array(a), np.array(b), **tolerance)


# Steps.


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory):
    """`meshes.steps` on a mesh of 2 x 2 x 2."""
    out = tmp_path_factory.mktemp("steps") / "out.json"
    finish(process("steps", out, json.dumps(AXES), devices=8))
    return json.loads(out.read_text())


def test_steps_on_eight_devices_are_those_on_one(on_eight):
    """Also where a device's rows have no legal anchor, and a head would have to be split."""
    on_one = steps(make_mesh(devices=jax.devices()[:1]))
    assert [m["labels"] > 0 for m in on_one["metrics"]] == [True] * 3
    for one, eight in zip(on_one["metrics"], on_eight["metrics"], strict=True):
        assert one.keys() == eight.keys()
        close([*one.values()], [eight[k] for k in one], rtol=1e-5)
    close(on_one["norms"], on_eight["norms"], rtol=1e-5)
    for one, eight in zip(on_one["sums"], on_eight["sums"], strict=True):
        close(one, eight, rtol=1e-5, atol=1e-6)


def collectives(program: str):
    """(kind, shapes of the results, whether in the loop over the vocabulary's chunks) of each."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for line in program.splitlines():
        if found := re.search(rf" = (.*?) ({kinds})(?:-start)?\(", line):
            shapes = [tuple(map(int, s.split(","))) for s in re.findall(r"\[([\d,]+)\]", found[1])]
            yield found[2], shapes, "/while/" in line


def test_no_device_ever_has_the_whole_head_or_its_logits(on_eight):
    every = list(collectives(on_eight["program"]))
    assert len(every) > 20
    for _, shapes, _ in every:
        assert not {VOCABULARY, CANDIDATES} & {n for shape in shapes for n in shape}
    in_loop = [(kind, shapes) for kind, shapes, looped in every if looped]
    assert in_loop
    for kind, shapes in in_loop:  # of a chunk's rows: sums over ids, and the best of each part
        assert kind in ("all-reduce", "all-gather")
        assert all(np.prod(shape) <= 32 * 4 for shape in shapes)


def test_features_are_read_by_the_rows_that_a_device_holds(on_eight):
    assert on_eight["read"] == [[0, 2], [2, 4], [4, 6], [6, 8]]


def test_devices_normalise_over_their_own_ids_and_meet_once(on_eight):
    every = [*collectives(on_eight["normalizer_program"])]
    assert every
    assert not [c for c in every if c[2]]


def test_a_step_has_the_collectives_that_it_needs(on_eight):
    """A gather of every sharded matrix, two sums a layer each way, and no reshuffling of activations."""
    count = collections.Counter(kind for kind, _, looped in collectives(on_eight["program"]) if not looped)  # fmt: skip
    assert count["all-to-all"] == 0
    assert count["all-gather"] <= 11
    assert count["all-reduce"] <= 12
    assert count["collective-permute"] <= 2


# Decoding.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "parts"),
    [
        (AXES, 8),
        pytest.param({"data": 8}, 8, marks=pytest.mark.deep),
        pytest.param({"model": 8}, 1, marks=pytest.mark.deep),
    ],
    ids=["both", "data", "model"],
)
def test_texts_decoded_on_eight_devices_are_those_of_one(tmp_path, axes, parts):
    """Eight devices do not divide the two key heads, so each has them all."""
    finish(process("decode", tmp_path / "out.json", json.dumps(axes), devices=8))
    eight = json.loads((tmp_path / "out.json").read_text())
    assert eight["tokens"] == decode(make_mesh(devices=jax.devices()[:1]))["tokens"]
    assert eight["parts"] == parts


@pytest.mark.parametrize(
    ("axes", "shape", "sums"),
    [
        ({"data": 2, "model": 4}, (32, 48, 8, 4, 8, 152), [2, 2]),
        pytest.param({"model": 8}, (32, 48, 6, 3, 8, 152), [2], marks=pytest.mark.deep),
        pytest.param({"data": 8}, (32, 48, 6, 3, 8, 152), [], marks=pytest.mark.deep),
    ],
    ids=["both", "model", "data"],
)
def test_a_round_has_the_collectives_that_its_layout_calls_for(tmp_path, axes, shape, sums):
    """Eight devices do not divide six heads, nor the chunks of 8 in which one device looks through 152 logits."""
    finish(process("collectives", tmp_path / "out.json", json.dumps(axes), *shape, devices=8))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["unexplained"] == []
    assert found["round"]
    for row in found["round"]:
        assert row["found"] == row["predicted"], row
    layers = [row["found"] for row in found["round"] if row["part"] == "target's layers"]
    assert layers == sums


# Loading.

LOADED = (
    "targets/qwen3_moe",
    "targets/qwen3_sharded_bf16",
    "drafts/domino",
    "drafts/speculators_reduced_vocab",
)


def two(command, devices: int) -> list[subprocess.Popen]:
    """Two processes that are one run, each with the command of its number."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    shared = dict(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2")
    return [
        process(*command(i), devices=devices, JAX_PROCESS_ID=str(i), **shared) for i in range(2)
    ]


def test_every_part_of_a_safetensors_folder_is_read_once(golden, tmp_path):
    folders = [golden / x for x in LOADED]
    finish(process("load", tmp_path / "out.json", json.dumps(AXES), *folders, devices=8))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found.keys() == {Path(x).name for x in LOADED}
    for one in found.values():
        assert one["read"] == one["held"] == one["whole"]


@pytest.mark.slow
def test_each_of_two_processes_reads_its_own_parts(golden, tmp_path):
    folders, outs = [golden / x for x in LOADED], [tmp_path / "0.json", tmp_path / "1.json"]
    finish(*two(lambda i: ("load", outs[i], '{"model": 8}', *folders), devices=4))
    found = [json.loads(out.read_text()) for out in outs]
    assert found[0] == found[1]
    for one in found[0].values():
        assert one["read"] == one["held"] < one["whole"]


# Runs.


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a store, and the recipe of four steps, the last of which decodes."""
    folder = tmp_path_factory.mktemp("mesh")
    examples = tiny_answers(8, 20, (*TAPS, LAST))
    for i in (3, 5):  # without a legal anchor
        last = np.arange(len(examples[i].tokens)) == len(examples[i].tokens) - 1
        examples[i] = dataclasses.replace(examples[i], supervised=last)
    write_shard(folder / "store", 0, examples, (*TAPS, LAST))
    config = recipe(
        folder / "one", batch_size=4, anchors=3, candidates=60, steps=4, evaluate_every=4, decode_every=1,
    )  # fmt: skip
    return folder, config


@pytest.mark.deep
def test_a_run_in_two_processes_is_the_run_on_one_device_and_goes_on_there(runs):
    folder, config = runs
    (folder / "recipe.toml").write_text(toml(config))
    mesh = "mesh={" + ", ".join(f"{k} = {v}" for k, v in AXES.items()) + "}"
    recipe_and_keys = folder / "recipe.toml", f'run="{folder / "two"}"', mesh, "distributed=true"
    both = two(lambda i: ("run", folder / "store", *recipe_and_keys), devices=4)
    one_device = make_mesh(devices=jax.devices()[:1])
    run.train(set_up_recipe(folder / "store", config, one_device))
    finish(*both)
    resumed = dataclasses.replace(config, run=str(folder / "resumed"))
    shutil.copytree(folder / "two", resumed.run)
    shutil.rmtree(folder / "resumed/checkpoints/4")
    run.train(set_up_recipe(folder / "store", resumed, one_device))

    whole, parts, again = (records(folder / name) for name in ("one", "two", "resumed"))
    assert [r["step"] for r in parts] == [1, 2, 3, 4]  # each once, though there were two
    close([r["loss"] for r in parts], [r["loss"] for r in whole], rtol=1e-5)
    close([r["loss"] for r in again], [r["loss"] for r in parts], rtol=1e-6)
    for name in ("acceptance_length", "decoded"):
        assert parts[-1][name] == again[-1][name] == whole[-1][name]
    leaves = [keys.flatten(read_draft(folder / name).params) for name in ("one", "two", "resumed")]
    for path, leaf in leaves[1].items():
        close(leaf, leaves[0][path], atol=1e-6)
        close(leaf, leaves[2][path], atol=1e-6)
    drafts = [(folder / name / "draft/config.json").read_text() for name in ("one", "two")]
    assert drafts[0] == drafts[1]


def test_a_mesh_of_another_number_of_devices_ends_before_anything_is_loaded(tmp_path, capsys):
    path = tmp_path / "recipe.toml"
    path.write_text(f'run = "{tmp_path / "run"}"\ntarget = "no/such"\nmesh = {{model = 512}}\n')
    assert run.main([str(path)]) == 1
    assert "is of 512 devices, but there are" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tensor": 2}, "mesh=.* with keys of .*'model'"),
        ({"data": 0}, "mesh=.* positive integers"),
        ({"data": 2, "fsdp": 4}, r"self\.batch_size=4 must be a multiple of .* 8, the mesh's data \* fsdp"),
        (3, "mesh=3 must be a table"),
    ],
)  # fmt: skip
def test_a_bad_mesh_is_one_error(mesh, message):
    with pytest.raises(ValueError, match=message):
        recipe("", batch_size=4, anchors=3, mesh=mesh)


def test_one_process_asks_no_other(tmp_path):
    assert greatest(None) is None
    assert greatest(15) == 15
    if len(jax.devices()) == 1:
        assert dict(start(recipe(tmp_path)).shape) == {"data": 1, "fsdp": 1, "model": 1}
