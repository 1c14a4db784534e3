import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from benchmarks import conversion
from convert import hf_to_orbax
from dflash_jax import pair
from dflash_jax.checkpoint import export, hf, keys, orbax, stream

ROOT = Path(__file__).parent.parent
TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "flags": np.array([True, False, True]),
    "b": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "ids": np.arange(5),
    "scalar": np.array(2.5, np.float16),
    "none": np.zeros((0, 3), np.float32),
}
SHAPES = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in TENSORS.items()}


def to_hugging_face(source, destination, shard_bytes=stream.SHARD_BYTES):
    """Writes the tensors of an Orbax target leaf by leaf."""
    config = orbax.read_header(source).config
    destination.mkdir()
    stream.write_tensors(
        destination, orbax.stream(source, config), orbax.read_shapes(source / "params"),
        functools.partial(export.tensors, config), shard_bytes,
    )  # fmt: skip


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name, x in a.items():
        y = b[name]
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name


def test_safetensors_are_written_as_the_library_reads_them_in_any_order(tmp_path):
    stream.write_safetensors(tmp_path, SHAPES, reversed(TENSORS.items()))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert_same(load_file(tmp_path / "model.safetensors"), TENSORS)
    assert_same(dict(hf.read_tensors(tmp_path)), TENSORS)
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    header = hf.read_header(tmp_path / "model.safetensors")
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in header.values())
    assert min(entry.offset for entry in header.values()) % 8 == 0


def test_shards_are_filled_in_order_and_indexed(tmp_path):
    stream.write_safetensors(tmp_path, SHAPES, TENSORS.items(), shard_bytes=60)
    files = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*files, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in TENSORS.values())}
    assert index["weight_map"] == {n: files[n not in ("a", "flags")] for n in TENSORS}
    assert_same(dict(hf.read_tensors(tmp_path)), TENSORS)


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path):
    stream.write_safetensors(tmp_path, SHAPES, TENSORS.items(), shard_bytes=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == 6
    assert_same(dict(hf.read_tensors(tmp_path)), TENSORS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ([("other", np.zeros(3))], "other is not to be written"),
        ([("a", TENSORS["a"])], "a is not to be written, or is there twice"),
        ([], "missing tensors: b, ids, scalar, none"),
        ([("b", TENSORS["b"].T)], r"b is bfloat16\[3, 2\], expected bfloat16\[2, 3\]"),
        ([("b", TENSORS["b"].astype(np.float32))], r"b is float32\[2, 3\], expected bfloat16"),
    ],
)
def test_tensors_other_than_the_announced_are_an_error(tmp_path, change, said):
    given = [("a", TENSORS["a"]), ("flags", TENSORS["flags"]), *change]
    with pytest.raises(ValueError, match=said):
        stream.write_safetensors(tmp_path, SHAPES, given)


@pytest.mark.parametrize(
    "name", ["qwen3_sharded_bf16", "qwen3_moe", pytest.param("qwen3_tied", marks=pytest.mark.deep)]
)
def test_a_target_goes_through_in_many_groups_bit_for_bit(golden, tmp_path, monkeypatch, name):
    monkeypatch.setattr(orbax, "_GROUP", 2**17)
    source = golden / "targets" / name
    assert hf_to_orbax.main([str(source), str(tmp_path / "ours")]) == 0
    assert_same(
        keys.flatten(orbax.load(tmp_path / "ours")[1]),
        keys.flatten(pair.read_target(source).params),
    )
    to_hugging_face(tmp_path / "ours", tmp_path / "back", 50_000)
    tensors = dict(hf.read_tensors(source))
    if name == "qwen3_tied":
        tensors.pop("lm_head.weight", None)
    assert_same(dict(hf.read_tensors(tmp_path / "back")), tensors)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_the_result_is_one_ordinary_orbax_checkpoint(golden, tmp_path, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    monkeypatch.setattr(orbax, "_GROUP", 20_000)
    source = golden / "targets/qwen3_gqa"
    assert hf_to_orbax.main([str(source), str(tmp_path / "ours")]) == 0
    tree = ocp.load(tmp_path / "ours/params")
    assert_same(keys.flatten(tree), keys.flatten(pair.read_target(source).params))
    left = {p.name for p in (tmp_path / "ours").iterdir()}
    assert left == {"params", "config.json"}


def test_groups_are_bounded_and_a_large_leaf_is_alone(monkeypatch):
    monkeypatch.setattr(orbax, "_GROUP", 100)
    taken = []

    def leaves():
        for i, n in enumerate((40, 50, 20, 300, 60, 40, 1)):
            taken.append(i)
            yield str(i), np.zeros(n, np.uint8)

    groups = [(list(group), len(taken)) for group in orbax._groups(leaves())]
    # The number of leaves that were read before each group was written.
    assert groups == [(["0", "1"], 3), (["2"], 4), (["3"], 4), (["4", "5"], 6), (["6"], 7)]


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, *(pytest.param(e, marks=pytest.mark.deep) for e in (KeyboardInterrupt, SystemExit))])  # fmt: skip
def test_an_interrupted_conversion_leaves_nothing_behind(golden, tmp_path, monkeypatch, error):
    monkeypatch.setattr(orbax, "_GROUP", 20_000)
    seen = []

    def interrupted(leaves):
        for i, pair_ in enumerate(leaves):
            if i == 20:
                seen.extend(p for p in tmp_path.rglob("*") if p.is_file())
                raise error
            yield pair_

    header, leaves = pair.open_target(golden / "targets/qwen3_gqa")
    with pytest.raises(error):
        orbax.write(tmp_path / "deep/er/ours", header, interrupted(leaves))
    assert seen, "nothing had been written yet: too early"
    assert not list(tmp_path.iterdir())


def test_faults_found_at_the_end_leave_nothing_behind_and_are_all_named(golden, tmp_path, capsys):
    source = golden / "targets/qwen3_gqa"
    broken = tmp_path / "broken"
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    del tensors["model.layers.0.mlp.up_proj.weight"]
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in tensors.items()}
    broken.mkdir()
    (broken / "config.json").write_text((source / "config.json").read_text())
    stream.write_safetensors(broken, shapes, tensors.items())
    assert hf_to_orbax.main([str(broken), str(tmp_path / "ours")]) == 1
    error = capsys.readouterr().err
    assert "2 tensors at fault" in error
    assert "model.norm.weight [48] holds NaN" in error
    assert "missing model.layers.0.mlp.up_proj.weight" in error
    assert [p.name for p in tmp_path.iterdir()] == ["broken"]


SLOW = """
import sys, time
from convert import hf_to_orbax
from dflash_jax.checkpoint import hf, orbax
orbax._GROUP = 20_000
read, count = hf._read_tensor, 0
def slow(*args):
    global count
    count += 1
    if count == 20:
        print("ready", flush=True)
        time.sleep(60)
    return read(*args)
hf._read_tensor = slow
sys.exit(hf_to_orbax.main(sys.argv[1:]))
"""


def test_a_terminated_conversion_leaves_nothing_behind(golden, tmp_path):
    command = [
        sys.executable,
        "-c",
        SLOW,
        str(golden / "targets/qwen3_gqa"),
        str(tmp_path / "ours"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "ready\n"
        assert [p for p in tmp_path.rglob("*") if p.is_file()], "too early"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


GROWTH = """
import json, sys
from pathlib import Path
from convert import hf_to_orbax
from dflash_jax import pair
from dflash_jax.checkpoint import orbax
from tests.test_stream import to_hugging_face
orbax._GROUP = 2**24

tiny, big = map(Path, sys.argv[1:])

def to_orbax(source, to):
    hf_to_orbax.convert(str(source), to)

def load(source, to):
    model = pair.load_target(source, "bfloat16")

jobs = {"to_orbax": (to_orbax, "hf", "ours"), "to_hugging_face": (to_hugging_face, "ours", "back"),
        "load": (load, "hf", None), "load_orbax": (load, "ours", None)}
growth = {}
for name, (job, source, to) in jobs.items():
    for folder in (tiny, big):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is used now
        before = memory("VmHWM")
        job(folder / source, folder / str(to))
        growth[name] = memory("VmHWM") - before
print(json.dumps(growth))
"""


@pytest.mark.slow
def test_conversion_holds_a_few_leaves_and_loading_one_model(golden, tmp_path):
    config = json.loads((golden / "targets/qwen3_gqa/config.json").read_text())
    wide = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "vocab_size": 8192,
        "layer_types": ["full_attention"] * 8,
    }
    for name, changes in (("tiny", {}), ("big", wide)):
        (tmp_path / name).mkdir()
        conversion.make_target(tmp_path / name / "hf", config | changes, 10**8)
    size = sum(p.stat().st_size for p in (tmp_path / "big/hf").glob("*.safetensors"))
    assert size > 2.3e8
    code = conversion.MEMORY + GROWTH
    run = subprocess.run(
        [sys.executable, "-c", code, *(str(tmp_path / p) for p in ("tiny", "big"))], cwd=ROOT,
        check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    growth = json.loads(run.stdout.splitlines()[-1])
    for name in ("to_orbax", "to_hugging_face"):
        assert growth[name] < 0.6 * size, growth
    for name in ("load", "load_orbax"):
        # What an earlier job freed may be used again.
        assert 0.7 * size < growth[name] < 1.4 * size, growth
