"""Every finding of `inspect` on a checkpoint with one fault, and none on sound ones."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from fakes import byte_tokenizer, random_params
from safetensors.numpy import load_file, save_file
from test_gguf import write as write_gguf

from dflash_jax import cli, pair
from dflash_jax.checkpoint import export, keys, orbax
from dflash_jax.checkpoint.inspect import inspect
from dflash_jax.config import DSpark

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
WEIGHTS = "model.safetensors"
UP = "layers.0.mlp.up_proj.weight"
SLIDES = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="session")
def bases(golden, tmp_path_factory):
    """Where a test's checkpoint is copied from: golden ones, and exports of ours, which are without a finding."""
    root = tmp_path_factory.mktemp("exports")
    for name in ("dflash_headdim", "dflash2", "domino"):
        source = golden / "drafts" / name
        config = pair.read_draft_config(source)
        export.save_draft(root / name, config, pair.read_draft(source, config).params)
    found = {p.name: p for kind in ("drafts", "targets") for p in (golden / kind).iterdir()}
    return found | {f"our_{p.name}": p for p in root.iterdir()}


@pytest.fixture
def broken(bases, tmp_path):
    """Copies a checkpoint with its config and tensors changed."""

    def make(base, config=None, tensors=None):
        folder = shutil.copytree(bases[base], tmp_path / base)
        if config:
            raw = json.loads((folder / "config.json").read_text())
            config(raw)
            (folder / "config.json").write_text(json.dumps(raw))
        if tensors:
            values = load_file(folder / WEIGHTS)
            tensors(values)
            save_file(values, folder / WEIGHTS)
        return folder

    return make


def found(folder, target=None):
    """(severity, field) of each finding, all of them whole."""
    findings = inspect(folder, target).findings
    assert all(f.effect and f.mend and "\n" not in f.effect + f.mend for f in findings)
    return sorted((f.severity, f.field) for f in findings)


def put(**changes):
    """Changes a config's keys: `inner` in `dflash_config`, `layers` in `transformer_layer_config`; None removes."""

    def change(raw):
        parts = {"inner": raw.get("dflash_config"), "layers": raw.get("transformer_layer_config")}
        for key, value in changes.items():
            for name, new in value.items() if key in parts else [(key, value)]:
                part = parts.get(key, raw)
                part.pop(name, None)
                part.update({} if new is None else {name: new})

    return change


OURS = "our_dflash_headdim"
CONFIGS = {
    "taps missing": (put(inner={"target_layer_ids": None}), [("error", "target_layer_ids")]),
    "tap on the number of layers": (put(inner={"target_layer_ids": [0, 1, 5]}), [("error", "target_layer_ids")]),
    "tap on the embedding": (put(inner={"target_layer_ids": [-1, 1, 3]}), [("error", "target_layer_ids")]),
    "taps out of range": (put(inner={"target_layer_ids": [0, 1, 9]}), [("error", "target_layer_ids")]),
    "taps descending": (put(inner={"target_layer_ids": [3, 1, 0]}), [("error", "target_layer_ids")]),
    "taps one above the default": (put(num_target_layers=12, inner={"target_layer_ids": [2, 6, 10]}), [("warning", "target_layer_ids")]),
    "tap on the last layer": (put(inner={"target_layer_ids": [0, 1, 4]}), [("warning", "target_layer_ids")]),
    "vLLM's taps differ": (put(inner={"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}), [("error", "eagle_aux_hidden_state_layer_ids")]),
    "too few taps for fc": (put(inner={"target_layer_ids": [0, 1]}), [("error", "fc.weight")]),
    "no RoPE": (put(rope_theta=None, rope_parameters=None), [("error", "rope_theta")]),
    "RoPE of transformers 4": (put(rope_parameters=None), [("note", "rope_parameters")]),
    "RoPE of transformers 5": (put(rope_theta=None, rope_scaling=None), [("note", "rope_theta")]),
    "two bases": (put(rope_theta=1e4), [("error", "rope_parameters")]),
    "two scalings": (put(rope_scaling=YARN), [("error", "rope_parameters")]),
    "scaling in one form": (put(rope_parameters={"rope_theta": 1e6, **YARN}), [("warning", "rope_scaling")]),
    "unknown scaling": (put(rope_scaling={"rope_type": "mrope"}, rope_parameters=None), [("error", "rope_parameters")]),
    "window off": (put(**{**SLIDES, "use_sliding_window": False}), [("error", "use_sliding_window")]),
    "window without a width": (put(**{**SLIDES, "sliding_window": None}), [("error", "sliding_window")]),
    "window unused": (put(sliding_window=4), [("warning", "use_sliding_window")]),
    "implicit causality": (put(**SLIDES, is_causal=None), [("note", "is_causal")]),
    "causal only in dflash_config": (put(is_causal=None, inner={"causal": True}), [("note", "is_causal")]),
    "JetSpec": (put(inner={"causal": True}), [("warning", "is_causal")]),
    "causal and not": (put(is_causal=True, inner={"causal": False}), [("error", "is_causal")]),
    "no mask": (put(inner={"mask_token_id": None}), [("error", "mask_token_id")]),
    "mask out of range": (put(inner={"mask_token_id": 256}), [("error", "mask_token_id")]),
    "mask below 0": (put(inner={"mask_token_id": -1}), [("error", "mask_token_id")]),
    "mask is a stop id": (put(eos_token_id=[1, 253]), [("warning", "mask_token_id")]),
    "mask is the padding": (put(pad_token_id=253), [("warning", "mask_token_id")]),
    "mask at the top level": (put(mask_token_id=253, inner={"mask_token_id": None}), [("note", "mask_token_id")]),
    "two masks": (put(mask_token_id=7), [("error", "mask_token_id")]),
    "no block size": (put(block_size=None, inner={"block_size": None}), [("error", "block_size")]),
    "block size inside only": (put(block_size=None), [("note", "block_size")]),
    "block size outside only": (put(inner={"block_size": None}), [("note", "block_size")]),
    "two block sizes": (put(block_size=16), [("error", "block_size")]),
    "no head width": (put(head_dim=None), [("error", "head_dim")]),
    "odd head width": (put(head_dim=15), [("error", "head_dim"), ("note", "head_dim")]),
    "key heads": (put(num_key_value_heads=2), [("error", "num_key_value_heads")]),
    "no depth": (put(num_target_layers=None), [("error", "num_target_layers")]),
    "unknown class": (put(architectures=["Qwen3DFlashDraftModel"]), [("note", "architectures")]),
    "no class": (put(architectures=None), [("note", "architectures")]),
    "class with code": (put(auto_map={"AutoModel": "dflash.DFlashDraftModel"}), [("note", "auto_map")]),
    "unknown key": (put(surprise=1), [("error", "surprise")]),
    "unknown key inside": (put(inner={"surprise": 1}), [("error", "dflash_config.surprise")]),
    "other activation": (put(hidden_act="gelu"), [("error", "hidden_act")]),
    "text for a number": (put(num_hidden_layers="2"), [("error", "num_hidden_layers")]),
    "fraction for a number": (put(hidden_size=48.0), [("error", "hidden_size")]),
    "layers beyond reason": (put(num_hidden_layers=10**9, layer_types=None), [("error", "num_hidden_layers")]),
    "another model": (put(model_type="llama"), [("error", "model_type")]),
    "no vocabulary": (put(vocab_size=None), [("error", "vocab_size")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_flat_drafts_config_with_one_fault_has_that_finding(broken, name):
    change, expected = CONFIGS[name]
    assert found(broken(OURS, change)) == sorted(expected)


def test_a_null_dflash_config_is_noted(broken):
    def change(raw):
        raw.update(raw["dflash_config"])
        raw["dflash_config"] = None

    assert found(broken(OURS, change)) == [("note", "block_size"), ("note", "dflash_config"), ("note", "mask_token_id")]  # fmt: skip


NESTED = {
    "taps missing": ("speculators_full", put(aux_hidden_state_layer_ids=None), ("error", "aux_hidden_state_layer_ids")),
    "tap on the embedding": ("speculators_full", put(aux_hidden_state_layer_ids=[0, 3]), ("error", "aux_hidden_state_layer_ids")),
    "tap on the last layer": ("speculators_full", put(aux_hidden_state_layer_ids=[1, 4]), ("warning", "aux_hidden_state_layer_ids")),
    "no RoPE": ("speculators_full", put(layers={"rope_parameters": None}), ("error", "rope_theta")),
    "window off": ("speculators_sliding_causal", put(layers={"use_sliding_window": False}), ("error", "use_sliding_window")),
    "causality not given": ("speculators_sliding_causal", put(sliding_window_non_causal=None), ("error", "sliding_window_non_causal")),
    "causal and not": ("speculators_sliding_noncausal", put(layers={"is_causal": True}), ("error", "sliding_window_non_causal")),
    "the converter's default": ("speculators_sliding_causal", put(layers={"is_causal": False}), ("warning", "sliding_window_non_causal")),
    "vLLM's default": ("speculators_full", put(), ("note", "sliding_window_non_causal")),
    "proposals": ("speculators_full", lambda raw: raw["speculators_config"]["proposal_methods"][0].update(speculative_tokens=6), ("warning", "speculative_tokens")),
    "no mask": ("speculators_full", put(mask_token_id=None), ("error", "mask_token_id")),
    "no block size": ("speculators_full", put(block_size=None), ("error", "block_size")),
    "no draft vocabulary": ("speculators_full", put(draft_vocab_size=None), ("error", "draft_vocab_size")),
    "other program": ("speculators_full", put(speculators_model_type="xpress"), ("error", "speculators_model_type")),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_a_speculators_draft_with_one_fault_has_that_finding(broken, golden, name):
    base, change, expected = NESTED[name]
    findings = found(broken(base, change), golden / "targets/qwen3_gqa")
    assert expected in findings
    loud = [x for x in findings if x[0] != "note"]
    assert loud == [x for x in [expected] if x[0] != "note"]


@pytest.mark.parametrize("ids", [[1, 5, 9], [3, 7, 11]])
def test_speculators_taps_in_another_convention_are_found_with_the_target(broken, tmp_path, ids):
    # Of 12 layers the default is 1, 5, 9 in flat drafts, and so 2, 6, 10 here.
    target = broken("qwen3_gqa", put(num_hidden_layers=12, layer_types=None))

    def fc(tensors):
        tensors["fc.weight"] = np.ones((48, 3 * 48), np.float32)

    draft = broken("speculators_full", put(aux_hidden_state_layer_ids=ids), fc)
    assert ("warning", "aux_hidden_state_layer_ids") in found(draft, target)
    draft = broken_again(draft, [2, 6, 10])
    assert ("warning", "aux_hidden_state_layer_ids") not in found(draft, target)


def broken_again(folder, ids):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "aux_hidden_state_layer_ids": ids}))
    return folder


def rename(old, new):
    return lambda t: t.update({new: t.pop(old)})


def fill(name, value, dtype=None):
    def change(tensors):
        tensors[name] = tensors[name].astype(dtype or tensors[name].dtype)
        tensors[name][0 if dtype else ...] = value

    return change


TENSORS = {
    "unknown": (OURS, lambda t: t.update(extra=np.ones(3, np.float32)), ("error", "extra")),
    "missing": (OURS, lambda t: t.pop(UP), ("error", UP)),
    "misshapen": (OURS, lambda t: t.update({UP: t[UP][:-1].copy()}), ("error", UP)),
    "duplicated": (OURS, lambda t: t.update({f"logit_head.{UP}": t[UP]}), ("error", f"logit_head.{UP}"), ("note", f"logit_head.{UP}")),
    "all zeros": (OURS, fill(UP, 0), ("error", UP)),
    "NaN": (OURS, fill(UP, np.nan), ("error", UP)),
    "infinite": (OURS, fill(UP, np.inf), ("error", UP)),
    "integers": (OURS, fill(UP, 1, np.int8), ("error", UP)),
    "float16": (OURS, fill(UP, 1, np.float16), ("warning", UP)),
    "model. prefix": (OURS, rename(UP, f"model.{UP}"), ("note", f"model.{UP}")),
    "rotary buffer": (OURS, lambda t: t.update({"rotary_emb.inv_freq": np.ones(4, np.float32)}), ("note", "rotary_emb.inv_freq")),
    "own head": (OURS, lambda t: t.update({"lm_head.weight": np.ones((256, 48), np.float32)}), ("note", "lm_head.weight")),
    "codebook": ("our_dflash2", rename("candidate_selector.successor_codebook", "candidate_selector.successor_codebook.weight"), ("note", "candidate_selector.successor_codebook.weight")),
    "logit_head. prefix": ("our_domino", rename("prefix_gru.weight_hh_l0", "logit_head.prefix_gru.weight_hh_l0"), ("note", "logit_head.prefix_gru.weight_hh_l0")),
    "d2t not ascending": ("speculators_reduced_vocab", fill("d2t", 200, np.int64), ("error", "d2t")),
    "t2d differs": ("speculators_reduced_vocab", lambda t: t["t2d"].__setitem__(slice(None), False), ("error", "t2d")),
    "no own head": ("speculators_reduced_vocab", lambda t: t.pop("lm_head.weight"), ("error", "lm_head.weight")),
    "target's NaN": ("qwen3_gqa", fill(f"model.{UP}", np.nan), ("error", f"model.{UP}")),
    "target's head missing": ("qwen3_gqa", lambda t: t.pop("lm_head.weight"), ("error", "lm_head.weight")),
    "tied head differs": ("qwen3_tied", lambda t: t.update({"lm_head.weight": np.ones((256, 48), np.float32)}), ("error", "lm_head.weight")),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_a_faulty_tensor_is_found(bases, broken, name):
    base, change, *expected = TENSORS[name]
    assert set(found(broken(base, tensors=change))) - set(found(bases[base])) == set(expected)


def test_many_faulty_tensors_are_one_finding(broken):
    def change(tensors):
        for name in list(tensors):
            tensors[f"decoder.{name}"] = tensors.pop(name)

    kinds = [f for f in inspect(broken(OURS, tensors=change)).findings if f.severity == "error"]
    assert len(kinds) == 2
    assert all("and " in f.field and "more" in f.field for f in kinds)


@pytest.mark.parametrize("keep", [0, 100, -40])
@pytest.mark.parametrize("base", [OURS, "qwen3_gqa"])
def test_unreadable_weights_are_an_error_finding(broken, base, keep):
    folder = broken(base)
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    assert ("error", WEIGHTS) in found(folder)
    path.unlink()
    assert ("error", WEIGHTS) in found(folder)


TARGETS = {
    "no stop ids": (put(eos_token_id=None), ("warning", "eos_token_id")),
    "stop ids beyond the head": (put(eos_token_id=256), ("warning", "eos_token_id")),
    "stop ids of another type": (put(eos_token_id="</s>"), ("error", "eos_token_id")),
    "padding of another type": (put(pad_token_id="<pad>"), ("error", "pad_token_id")),
    "no RoPE": (put(rope_parameters=None), ("error", "rope_theta")),
    "two bases": (put(rope_theta=1e4), ("error", "rope_parameters")),
    "no head width": (put(head_dim=None), ("error", "head_dim")),
    "another architecture": (put(model_type="gemma3"), ("error", "model_type")),
    "recurrent layers": (put(model_type="qwen3_next"), ("error", "model_type")),
    "unknown key": (put(surprise=1), ("error", "surprise")),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_a_targets_config_with_one_fault_has_that_finding(broken, name):
    change, expected = TARGETS[name]
    folder = broken("qwen3_gqa", change)
    (folder / "generation_config.json").unlink()
    assert [x for x in found(folder) if x[0] != "note"] == [expected]


def test_a_target_without_a_tokenizer_is_noted_and_with_one_not(broken):
    folder = broken("qwen3_gqa")
    assert ("note", "tokenizer") in found(folder)
    byte_tokenizer().save_pretrained(folder)
    assert ("note", "tokenizer") not in found(folder)
    byte_tokenizer(extra=["<more>"]).save_pretrained(folder)
    assert ("warning", "vocab_size") in found(folder)
    (folder / "tokenizer.json").write_text("{")
    assert ("warning", "tokenizer") in found(folder)


PAIRS = {
    "hidden size": (put(hidden_size=64), ("error", "hidden_size")),
    "vocabulary": (put(vocab_size=300), ("error", "vocab_size")),
    "depth": (put(num_target_layers=6), ("error", "num_target_layers")),
    "stop id": (put(inner={"mask_token_id": 1}), ("error", "mask_token_id")),
    "RoPE base": (put(rope_theta=5e4, rope_parameters={"rope_theta": 5e4}), ("note", "rope_theta")),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_a_draft_of_another_target_is_found(broken, bases, golden, name):
    change, expected = PAIRS[name]
    target = broken("qwen3_tied", put(rope_parameters={"rope_theta": 1e6}))
    assert found(bases[OURS], target) == []
    assert expected in found(broken(OURS, change), target)


def test_a_mask_that_is_the_targets_padding_is_found(broken, bases):
    target = broken("qwen3_tied", put(pad_token_id=253, rope_parameters={"rope_theta": 1e6}))
    assert found(bases[OURS], target) == [("error", "mask_token_id")]


def test_a_target_that_cannot_be_read_is_an_error(broken, bases):
    assert ("error", "--target") in found(bases[OURS], broken("qwen3_gqa", put(surprise=1)))


def test_tokenizers_are_compared_and_the_mask_looked_for_in_the_template(broken):
    target, draft = broken("qwen3_tied", put(rope_parameters={"rope_theta": 1e6})), broken(OURS)
    mask = byte_tokenizer().convert_ids_to_tokens(253)
    byte_tokenizer().save_pretrained(target)
    byte_tokenizer().save_pretrained(draft)
    assert found(draft, target) == []
    assert inspect(draft, target).about["mask_token"] == mask
    byte_tokenizer("{{ messages }}" + mask).save_pretrained(target)
    assert found(draft, target) == [("warning", "mask_token_id")]
    byte_tokenizer(extra=["<more>"]).save_pretrained(draft)
    assert ("warning", "tokenizer") in found(draft, target)


@pytest.mark.parametrize("kind", ["drafts", "targets"])
def test_golden_checkpoints_have_neither_errors_nor_warnings(golden, kind):
    for folder in sorted((golden / kind).iterdir()):
        loud = [x for x in found(folder) if x[0] != "note"]
        expected = [("error", "target_layer_ids")] if folder.name == "dflash_default_ids" else []
        assert loud == expected, folder.name


def test_our_exports_and_the_embedded_draft_have_no_finding(bases):
    assert found(bases[OURS]) == []
    assert found(pair.EMBEDDED_DRAFT) == []
    for name in ("our_dflash2", "our_domino"):
        assert found(bases[name]) == [
            ("note", "head_dim")
        ]  # their heads are not hidden / heads wide


def test_our_orbax_checkpoints_are_told_and_their_faults_found(golden, tmp_path):
    target = pair.read_target(golden / "targets/qwen3_moe")
    draft = pair.read_draft(
        golden / "drafts/dflash_full", pair.read_draft_config(golden / "drafts/dflash_full")
    )
    orbax.save(tmp_path / "t", "target", target.config, target.params, stop_token_ids=(1,))
    orbax.save(tmp_path / "d", "draft", draft.config, draft.params)
    assert found(tmp_path / "t") == [("note", "tokenizer")]
    assert found(tmp_path / "d") == []
    about = inspect(tmp_path / "d").about
    assert (about["dialect"], about["parameters"]) == ("dflash-jax, Orbax", 32576)
    shutil.rmtree(tmp_path / "d/params")
    assert found(tmp_path / "d") == [("error", "params")]


def test_a_dspark_draft_is_judged_by_its_own_layout(bases, tmp_path):
    config = pair.read_draft_config(bases[OURS])
    own = {"head": DSpark(markov_rank=4), "own_head": True, "own_embedding": True, "sample_from_anchor": True}  # fmt: skip
    config = dataclasses.replace(config, **own)
    raw = json.loads((bases[OURS] / "config.json").read_text())
    raw |= {**raw.pop("dflash_config"), "markov_rank": 4, "architectures": ["Qwen3DSparkModel"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    leaves = keys.flatten(random_params(config, 0))
    save_file({keys.name_of(p): np.asarray(x) for p, x in leaves.items()}, tmp_path / WEIGHTS)
    assert found(tmp_path) == []
    about = inspect(tmp_path).about
    assert about["dialect"] == "DeepSpec or NeMo DSpark, flat"
    assert about["head"].startswith("DSpark")
    assert (about["own_head"], about["own_embedding"]) == (True, True)


def test_a_gguf_target_is_told_and_judges_a_draft(golden, bases, tmp_path):
    raw = json.loads((golden / "targets/llama3/config.json").read_text())
    tensors = load_file(golden / "targets/llama3" / WEIGHTS)
    path = write_gguf(tmp_path / "m.gguf", "llama", raw, tensors)
    report = inspect(path)
    assert report.findings == ()
    assert report.about["dialect"] == "GGUF"
    assert report.about["dtypes"] == {"F32": len(tensors)}
    assert report.about["bytes"] == sum(t.nbytes for t in tensors.values())
    assert ("error", "num_target_layers") in found(bases[OURS], path)
    tensors["model.norm.weight"][:] = np.nan
    write_gguf(path, "llama", raw, tensors)
    assert found(path) == [("error", "model.norm.weight")]


def test_what_a_checkpoint_is_is_told(golden):
    about = inspect(golden / "drafts/speculators_sliding_causal").about
    assert about["kind"] == "draft"
    assert about["dialect"] == "speculators, nested"
    assert about["target_layer_ids"] == [0, 2]
    assert "[1, 3]" in about["stored_as"]
    assert about["layer_kinds"] == {"sliding 6": 1, "full": 1}
    assert (about["window_rule"], about["causal_layers"]) == ("speculators", [0])
    assert (about["block_size"], about["mask_token_id"]) == (6, 253)
    assert about["dtypes"] == {"float32": 25}
    tensors = load_file(golden / "drafts/speculators_sliding_causal" / WEIGHTS)
    assert about["parameters"] == sum(t.size for t in tensors.values())
    assert about["bytes"] == 4 * about["parameters"]
    assert inspect(golden / "drafts/domino").about["dialect"] == "SpecForge, flat"
    sharded = inspect(golden / "targets/qwen3_sharded_bf16").about
    assert (sharded["kind"], set(sharded["dtypes"])) == ("target", {"bfloat16"})


def test_what_is_no_checkpoint_is_one_line(tmp_path, golden, capsys):
    (tmp_path / "x").write_text("x")
    for ref in (tmp_path, tmp_path / "x", tmp_path / "nowhere"):
        assert cli.main(["inspect", str(ref)]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
    draft, target = str(golden / "drafts/dflash_full"), str(golden / "targets/qwen3_gqa")
    assert cli.main(["inspect", target, "--target", target]) == 1
    assert "--target is for drafts" in capsys.readouterr().err
    assert cli.main(["inspect", draft, "--target", draft]) == 1
    assert "is a draft, not a target" in capsys.readouterr().err


def test_the_command_prints_a_table_or_json_and_its_status_is_the_verdict(broken, capsys):
    folder = broken(OURS, put(inner={"mask_token_id": None}))
    assert cli.main(["inspect", str(folder)]) == 1
    text = capsys.readouterr().out
    assert "error: mask_token_id\n" in text
    assert "mend: write the trained id" in text
    assert text.endswith("1 error\n")
    assert cli.main(["inspect", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["sound"] is False
    assert [(f["severity"], f["field"]) for f in report["findings"]] == [("error", "mask_token_id")]
    assert report["about"]["kind"] == "draft"
    assert cli.main(["inspect", str(pair.EMBEDDED_DRAFT)]) == 0
    assert capsys.readouterr().out.endswith("nothing found wrong\n")


def test_a_terminal_gets_the_same_findings_as_a_table(broken, capsys):
    from rich.console import Console

    from dflash_jax.checkpoint.inspect.render import table

    console = Console(width=200, force_terminal=True)
    console.print(table(inspect(broken(OURS, put(block_size=None)))))
    text = capsys.readouterr().out
    for part in ("mask_token_id", "note", "block_size", "write it at the top level too", "1 note"):
        assert part in text
