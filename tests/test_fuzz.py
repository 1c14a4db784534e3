"""Damaged checkpoints: one line of ValueError or the whole model, and nothing else, from every reader."""

import contextlib
import copy
import json
import shutil

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from test_gguf import write as write_gguf

from dflash_jax import pair
from dflash_jax.checkpoint import keys, orbax
from dflash_jax.checkpoint.inspect import inspect

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:is_causal:UserWarning"
)
WEIGHTS = "model.safetensors"
FOLDERS = ("draft", "nested", "target", "sharded")

fuzz = lambda examples: settings(
    max_examples=examples, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


def refused(error):
    """Asserts that a refusal is one line."""
    assert len(str(error).splitlines()) == 1


def load(path):
    """The model, or None if it is refused as it must be."""
    try:
        if path.name in ("draft", "nested", "orbax_draft"):
            return pair.read_draft(path, pair.read_draft_config(path, num_target_layers=4))
        return pair.read_target(path)
    except ValueError as e:
        refused(e)
        return None


def examine(path):
    """What the reader gives, checked against what `inspect` says."""
    model = load(path)
    try:
        report = inspect(path)
    except ValueError as e:
        refused(e)
        assert model is None
        return None
    assert model is not None or not report.sound
    assert not any("\n" in f.field + f.effect + f.mend for f in report.findings)
    if model is not None:
        keys.check_params(model.params, model.config, path)
    return model


def same(a, b):
    """Whether two models are equal in all but their place."""
    told = lambda m: (
        m.config,
        getattr(m, "stop_token_ids", None),
        getattr(m, "pad_token_id", None),
    )
    return told(a) == told(b) and not differing(a, b)


def differing(a, b):
    """Paths of the parameters that are not equal bit for bit."""
    mine, theirs = keys.flatten(a.params), keys.flatten(b.params)
    assert mine.keys() == theirs.keys()
    return [p for p in mine if mine[p].dtype != theirs[p].dtype or np.asarray(mine[p]).tobytes() != np.asarray(theirs[p]).tobytes()]  # fmt: skip


@pytest.fixture(scope="module")
def sound(golden, tmp_path_factory):
    """Sound checkpoints by name, and the models in them."""
    root = tmp_path_factory.mktemp("sound")
    sources = ("drafts/dflash_mixed", "drafts/speculators_reduced_vocab", "targets/qwen3_tied", "targets/qwen3_sharded_bf16")  # fmt: skip
    for name, source in zip(FOLDERS, sources):
        shutil.copytree(golden / source, root / name, ignore=shutil.ignore_patterns("expected*", "case*"))  # fmt: skip
    raw = json.loads((golden / "targets/llama3/config.json").read_text())
    write_gguf(root / "m.gguf", "llama", raw, load_file(golden / "targets/llama3" / WEIGHTS))
    models = {path: load(path) for path in root.iterdir()}
    draft = models[root / "draft"]
    orbax.save(root / "orbax_draft", "draft", draft.config, draft.params)
    return models | {root / "orbax_draft": draft}


@pytest.fixture(scope="module")
def by_name(sound):
    return {path.name: path for path in sound}


@contextlib.contextmanager
def damaged(path, data):
    """The file with other bytes, for a while."""
    whole = path.read_bytes()
    try:
        path.write_bytes(data)
        yield
    finally:
        path.write_bytes(whole)


def files(folder):
    return sorted(p for p in folder.iterdir() if p.is_file())


@fuzz(30)
@given(data=st.data())
def test_truncated_files_are_refused(sound, by_name, data):
    folder = by_name[data.draw(st.sampled_from(FOLDERS))]
    path = data.draw(st.sampled_from(files(folder)))
    whole = path.read_bytes()
    with damaged(path, whole[: data.draw(st.integers(0, len(whole) - 1))]):
        model = examine(folder)
    assert model is None or same(model, sound[folder])


@fuzz(50)
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_confined_to_one_value(sound, by_name, data):
    folder = by_name[data.draw(st.sampled_from(FOLDERS))]
    path = data.draw(st.sampled_from(files(folder)))
    whole = bytearray(path.read_bytes())
    is_json = path.suffix == ".json"
    start = 0 if is_json else 8 + int.from_bytes(whole[:8], "little")
    # As often in the header of a weight file as in its values, which are far longer.
    end = len(whole) if is_json or data.draw(st.booleans()) else start
    at = data.draw(st.integers(0, end - 1))
    before = None if not is_json else json.loads(whole)
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    with damaged(path, whole):
        model = examine(folder)
    if model is None or same(model, sound[folder]):
        return
    if is_json:
        assert names_of(json.loads(whole)) == names_of(before)  # a value, never a key
        assert not differing(model, sound[folder])
    else:
        assert at >= start
        assert model.config == sound[folder].config
        assert len(differing(model, sound[folder])) == 1


def names_of(value):
    """Every key of a JSON value."""
    if isinstance(value, dict):
        return {k: names_of(v) for k, v in value.items()}
    return None


def places(value, path=()):
    """Every key of a JSON object, by the way to it."""
    for key, inner in value.items():
        yield (*path, key)
        if isinstance(inner, dict):
            yield from places(inner, (*path, key))


ANY = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 5), st.sampled_from([2**31, 2**40, 10**25, -(2**63)]), st.floats(),
    st.text(max_size=4), st.lists(st.one_of(st.integers(-1, 4), st.text(max_size=2), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), st.just([[1]]), st.just([{}]),
)  # fmt: skip


def edit(data, raw, how):
    """A copy of a JSON object with one key renamed or one value replaced, and which."""
    raw = copy.deepcopy(raw)
    place = data.draw(st.sampled_from(sorted(places(raw))))
    node = raw
    for key in place[:-1]:
        node = node[key]
    value = node.pop(place[-1])
    if how == "rename":
        node[data.draw(st.sampled_from([place[-1] + "s", "x\n" + place[-1], place[-1][:-1]]))] = (
            value
        )
    else:
        node[place[-1]] = data.draw(ANY)
    return raw, place


@fuzz(40)
@given(data=st.data())
def test_a_renamed_key_is_refused_unless_it_says_nothing(sound, by_name, data):
    folder = by_name[data.draw(st.sampled_from((*FOLDERS, "orbax_draft")))]
    path = folder / "config.json"
    raw, _ = edit(data, json.loads(path.read_text()), "rename")
    with damaged(path, json.dumps(raw).encode()):
        model = examine(folder) if folder.name != "orbax_draft" else header(folder)
    assert model is None or model == sound[folder].config or same(model, sound[folder])


@fuzz(40)
@given(data=st.data())
def test_a_key_of_another_type_is_refused_or_understood(sound, by_name, data):
    folder = by_name[data.draw(st.sampled_from((*FOLDERS, "orbax_draft")))]
    path = data.draw(st.sampled_from([p for p in files(folder) if p.suffix == ".json"]))
    raw, _ = edit(data, json.loads(path.read_text()), "retype")
    with damaged(path, json.dumps(raw).encode()):
        model = examine(folder) if folder.name != "orbax_draft" else header(folder)
    if model is not None and folder.name != "orbax_draft":
        assert not differing(model, sound[folder])


def header(folder):
    """The config of an Orbax folder, or None if it is refused; with the shapes that it asks for."""
    try:
        config = orbax.read_header(folder).config
        keys.expected_shapes(config)
        return config
    except ValueError as e:
        refused(e)
        return None


@fuzz(15)
@given(data=st.data())
def test_tensors_renamed_retyped_or_reshaped_are_refused_or_the_same_numbers(sound, by_name, data):
    folder = by_name[data.draw(st.sampled_from(("draft", "nested", "target")))]
    tensors = load_file(folder / WEIGHTS)
    name = data.draw(st.sampled_from(sorted(tensors)))
    value = tensors.pop(name)
    how = data.draw(st.sampled_from(["drop", "rename", "dtype", "transpose", "cut"]))
    if how == "rename":
        tensors[
            data.draw(st.sampled_from([f"model.{name}", f"x.{name}", f"{name}\n", name[:-1]]))
        ] = value
    elif how == "dtype":
        kind = data.draw(st.sampled_from(["float16", "float64", "int8", "int64", "bool", "uint8"]))
        tensors[name] = value.astype(kind)
    elif how != "drop":
        tensors[name] = np.ascontiguousarray(value.T if how == "transpose" else value[:-1])
    whole = (folder / WEIGHTS).read_bytes()
    try:
        save_file(tensors, folder / WEIGHTS)
        model = examine(folder)
    finally:
        (folder / WEIGHTS).write_bytes(whole)
    if model is not None:
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
        jax.tree.map(close, model.params, sound[folder].params)


@fuzz(40)
@given(data=st.data())
def test_damaged_gguf_files_are_refused_or_of_the_right_shape(sound, by_name, data):
    path = by_name["m.gguf"]
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        with damaged(path, whole[: data.draw(st.integers(0, len(whole) - 1))]):
            assert load(path) is None
        return
    at = data.draw(st.integers(0, data.draw(st.sampled_from([400, 9000, len(whole) - 1]))))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    with damaged(path, whole):
        model = load(path)
    if model is not None:
        assert keys.flatten(model.params).keys() == keys.flatten(sound[path].params).keys()
        keys.check_params(model.params, model.config, path)


@fuzz(3)
@given(data=st.data())
def test_a_damaged_orbax_config_is_refused_or_loads_the_same_numbers(sound, by_name, data):
    folder = by_name["orbax_draft"]
    raw, _ = edit(data, json.loads((folder / "config.json").read_text()), "retype")
    with damaged(folder / "config.json", json.dumps(raw).encode()):
        model = examine(folder)
    if model is not None:
        assert not differing(model, sound[folder])
