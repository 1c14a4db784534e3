import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import simulated

from convert import hf_to_orbax
from dflash_jax import pair
from dflash_jax.checkpoint import export, files, hf, keys, orbax


@pytest.fixture
def draft(golden):
    return pair.read_draft(
        golden / "drafts/dflash_headdim",
        pair.read_draft_config(golden / "drafts/dflash_headdim"),
        jnp.bfloat16,
    )


@pytest.fixture
def saved(draft, tmp_path):
    orbax.save(tmp_path / "saved", "draft", draft.config, draft.params)
    return tmp_path / "saved"


def assert_same(a, b):
    a, b = keys.flatten(a), keys.flatten(b)
    assert a.keys() == b.keys()
    for path in a:
        x, y = np.asarray(a[path]), np.asarray(b[path])
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8), err_msg=path)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_saving_and_loading_is_bit_identical(draft, tmp_path, dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), draft.params)
    orbax.save(tmp_path / "a", "draft", draft.config, params)
    header, got = orbax.load(tmp_path / "a")
    assert (header.kind, header.config) == ("draft", draft.config)
    assert_same(got, params)


def test_a_checkpoint_does_not_say_where_it_was_made(saved, tmp_path):
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert not [path for path in files if str(tmp_path).encode() in path.read_bytes()]
    assert (saved / "params/commit_success.txt").exists()


def test_loading_casts_to_the_dtype_asked_for(saved, draft):
    _, got = orbax.load(saved, jnp.float32)
    assert_same(got, jax.tree.map(lambda x: x.astype(jnp.float32), draft.params))


@pytest.mark.parametrize("name", ["qwen3_bias_yarn", "llama3", "qwen3_sliding", "qwen3_moe"])
def test_a_targets_config_stop_ids_and_tokenizer_files_are_kept(golden, tmp_path, name):
    target = pair.read_target(golden / "targets" / name)
    (tmp_path / "tokenizer.json").write_text("{}")
    orbax.save(
        tmp_path / "a", "target", target.config, target.params,
        stop_token_ids=(1, 7), pad_token_id=3, tokenizer_files=[tmp_path / "tokenizer.json"],
    )  # fmt: skip
    header, got = orbax.load(tmp_path / "a")
    assert header == orbax.Header("target", target.config, (1, 7), 3)
    assert hash(header.config) == hash(target.config)
    assert (tmp_path / "a/tokenizer.json").read_text() == "{}"
    assert_same(got, target.params)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_the_parameters_are_a_plain_orbax_tree(saved, draft):
    from orbax.checkpoint import v1 as ocp

    assert_same(ocp.load(saved / "params"), draft.params)


MESH = """
import sys, jax, numpy as np
from pathlib import Path
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from dflash_jax import pair
from dflash_jax.checkpoint import keys, orbax

source, single, sharded = map(Path, sys.argv[1:])
target = pair.read_target(source)
mesh = Mesh(np.array(jax.devices()), ("x",))
n = len(jax.devices())

def place(path, shape):
    return NamedSharding(mesh, P("x") if shape[0] % n == 0 else P())

def check(directory):
    got = keys.flatten(orbax.load(directory, sharding=place)[1])
    for path, leaf in keys.flatten(target.params).items():
        assert got[path].sharding == place(path, leaf.shape), path
        np.testing.assert_array_equal(got[path], leaf)
        parts = {s.data.shape[0] for s in got[path].addressable_shards}
        assert parts == {leaf.shape[0] // n if leaf.shape[0] % n == 0 else leaf.shape[0]}, path

check(single)
if not sharded.exists():
    placed = {path: jax.device_put(x, place(path, x.shape)) for path, x in keys.flatten(target.params).items()}
    orbax.save(sharded, "target", target.config, keys.nest(placed))
check(sharded)
everywhere = orbax.load(sharded, sharding=NamedSharding(mesh, P()))[1]
assert {x.sharding.num_devices for x in jax.tree.leaves(everywhere)} == {n}
print(n)
"""


@pytest.mark.slow
def test_checkpoints_of_one_and_of_eight_devices_restore_on_one_two_and_eight(tmp_path, golden):
    source, single, sharded = (
        golden / "targets/qwen3_gqa",
        tmp_path / "single",
        tmp_path / "sharded",
    )
    target = pair.read_target(source)
    orbax.save(single, "target", target.config, target.params)
    for devices in (8, 2):
        flags = {"XLA_FLAGS": simulated(devices), "JAX_PLATFORMS": "cpu"}
        run = subprocess.run(
            [sys.executable, "-c", MESH, str(source), str(single), str(sharded)], check=True,
            env={**os.environ, **flags}, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert run.stdout == f"{devices}\n"
    assert_same(orbax.load(sharded)[1], target.params)
    assert {x.sharding.num_devices for x in jax.tree.leaves(orbax.load(sharded)[1])} == {1}


def test_leaves_that_are_not_asked_for_are_not_read(tmp_path):
    from orbax.checkpoint import v1 as ocp

    rng = np.random.default_rng(0)
    tree = {name: {"w": rng.integers(0, 2**32, 4096, np.uint32)} for name in ("params", "moments")}
    ocp.save(tmp_path / "a", tree)
    lost = tree["moments"]["w"].tobytes()[:64]
    files = [p for p in (tmp_path / "a").rglob("*") if p.is_file() and lost in p.read_bytes()]
    assert files, "the bytes are not stored as they are"
    for file in files:
        data = file.read_bytes()
        start = data.index(lost)
        header = data.rindex(b"\x28\xb5\x2f\xfd", 0, start)  # of its zstandard frame
        file.write_bytes(data[:header] + bytes(start - header) + data[start:])
    stored = orbax.read_shapes(tmp_path / "a")
    leaves = dict(orbax.read_leaves(tmp_path / "a", {"params/w": stored["params/w"]}))
    assert leaves.keys() == {"params/w"}
    np.testing.assert_array_equal(leaves["params/w"], tree["params"]["w"])
    with pytest.raises(ValueError, match="not a readable Orbax checkpoint"):
        dict(orbax.read_leaves(tmp_path / "a", stored))


def test_the_largest_leaves_are_read_first(tmp_path, monkeypatch):
    """Whatever their number of elements or names; so nothing else is held beside a large one."""
    from orbax.checkpoint import v1 as ocp

    tree = {
        "a": np.ones(3, np.float32), "b": np.ones(60, np.float16), "c": np.ones((4, 10), np.float32)
    }  # fmt: skip
    ocp.save(str(tmp_path / "a"), tree)
    monkeypatch.setattr(orbax, "_GROUP", 100)
    order = [
        path for path, _ in orbax.read_leaves(tmp_path / "a", orbax.read_shapes(tmp_path / "a"))
    ]
    assert order == ["c", "b", "a"]


def test_an_existing_destination_is_refused_and_kept(draft, tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        orbax.save(tmp_path / "a", "draft", draft.config, draft.params)
    with pytest.raises(ValueError, match="exists already"):
        export.save_draft(tmp_path / "a", draft.config, draft.params)
    assert [p.name for p in tmp_path.rglob("*")] == ["a"]


def test_a_failed_save_leaves_nothing_behind(draft, tmp_path):
    missing = tmp_path / "nowhere/tokenizer.json"
    with pytest.raises(OSError, match="nowhere"):
        orbax.save(
            tmp_path / "deep/er/a", "draft", draft.config, draft.params, tokenizer_files=[missing]
        )
    assert not list(tmp_path.iterdir())


def test_an_atomic_folder_appears_whole_or_not_at_all(tmp_path):
    with files.atomic_folder(tmp_path / "new/a") as folder:
        (folder / "x").write_text("x")
        assert not (tmp_path / "new/a").exists()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a"]
    with pytest.raises(KeyboardInterrupt), files.atomic_folder(tmp_path / "b") as folder:
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("save", [functools.partial(orbax.save, kind="draft"), export.save_draft])
def test_parameters_of_another_config_are_not_written(draft, tmp_path, save):
    params = {**draft.params, "fc": {"weight": jnp.ones((48, 47))}, "head": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"misshapen fc/weight \[48, 47\]") as e:
        save(tmp_path / "a", config=draft.config, params=params)
    assert "unknown head [3]" in str(e.value)
    assert not list(tmp_path.iterdir())


def test_a_kind_that_is_not_the_configs_is_refused(draft, tmp_path):
    with pytest.raises(ValueError, match="kind='target' does not fit a DraftConfig"):
        orbax.save(tmp_path / "a", "target", draft.config, draft.params)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "format='other'"),
        ({"version": 2}, "version=2 must be 1"),
        ({"kind": "critic"}, "kind='critic'"),
        ({"config": {}}, "not a complete config"),
        ({"stop_token_ids": "12"}, "not a complete config"),
        ({"pad_token_id": "0"}, "not a complete config"),
        ({"stop_token_ids": None}, "not a complete config"),
    ],
)
def test_a_header_that_is_not_understood_is_an_error(saved, change, said):
    path = saved / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=said):
        orbax.load(saved)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 48.0), ("qk_norm", 1), ("rms_norm_eps", "1e-6"), ("layer_types", [1, 2]), ("is_causal", "no"),
        ("num_hidden_layers", 10**9), ("block_size", 2**40), ("input_embedding_scale", float("nan")), ("surprise", 1),
    ],
)  # fmt: skip
def test_a_field_of_another_type_is_an_error_naming_it(saved, field, value):
    path = saved / "config.json"
    raw = json.loads(path.read_text())
    raw["config"][field] = value
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"{field}="):
        orbax.read_header(saved)


def test_parameters_that_do_not_fit_the_header_are_an_error(saved):
    path = saved / "config.json"
    value = json.loads(path.read_text())
    value["config"]["num_hidden_layers"] = 1
    value["config"]["layer_types"] = ["full_attention"]
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"unknown layers_1/input_layernorm/weight \[48\]"):
        orbax.load(saved)


@pytest.mark.filterwarnings("ignore")  # Orbax leaves futures behind that nobody awaits
def test_lost_or_broken_parameter_files_are_one_clear_line(saved):
    for file in [p for p in (saved / "params").rglob("d/*") if p.is_file()]:
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(ValueError, match="params is not a readable Orbax checkpoint") as e:
        orbax.load(saved)
    assert "\n" not in str(e.value)
    (saved / "params").rename(saved / "weights")
    with pytest.raises(ValueError, match="params is not a readable Orbax checkpoint"):
        orbax.load(saved)


def test_an_export_has_the_flat_layout_in_bfloat16(draft, tmp_path):
    export.save_draft(tmp_path / "a", draft.config, draft.params)
    config = hf.read_config(tmp_path / "a")
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["DFlashDraftModel"]
    tensors = dict(hf.read_tensors(tmp_path / "a"))
    assert {str(t.dtype) for t in tensors.values()} == {"bfloat16"}
    assert "fc.weight" in tensors
    assert "layers.1.self_attn.q_norm.weight" in tensors
    assert not [n for n in tensors if n.startswith("model.") or "embed" in n or "lm_head" in n]
    assert_same(pair.read_draft(tmp_path / "a", draft.config).params, draft.params)


def test_the_converter_takes_targets_dtypes_and_tap_ids(golden, tmp_path):
    source = str(golden / "targets/qwen3_sharded_bf16")
    assert hf_to_orbax.main([source, str(tmp_path / "kept")]) == 0
    assert hf_to_orbax.main([source, str(tmp_path / "cast"), "--dtype", "float32"]) == 0
    for name, dtype in (("kept", jnp.bfloat16), ("cast", jnp.float32)):
        header, params = orbax.load(tmp_path / name)
        assert header.stop_token_ids == (1,)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    source = str(golden / "drafts/dflash_default_ids")
    for ids, expected in (("default", (1, 2)), ("0,3", (0, 3))):
        assert hf_to_orbax.main([source, str(tmp_path / ids), "--target-layer-ids", ids]) == 0
        assert orbax.read_header(tmp_path / ids).config.target_layer_ids == expected


def test_the_converters_mistakes_are_one_line_and_status_1(golden, tmp_path, capsys):
    draft, target = (str(golden / p) for p in ("drafts/dflash_default_ids", "targets/llama3"))
    out = str(tmp_path / "out")
    for args, said in (
        ([draft, out], "lacks target_layer_ids"),
        ([target, out, "--target-layer-ids", "default"], "is a target"),
        ([draft, out, "--target-layer-ids", "1,x"], "'1,x' must be ids like 1,9,17"),
        ([str(tmp_path / "nowhere"), out], "neither an existing path"),
        ([target, str(tmp_path)], "exists already"),
    ):
        assert hf_to_orbax.main(args) == 1
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
