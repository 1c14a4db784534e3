import contextlib
import importlib
import io
import json
import re
import shutil
import signal
import sys

import pytest
from fakes import byte_tokenizer

from dflash_jax import bench, command
from dflash_jax.checkpoint import hf, hub
from dflash_jax.cli import main
from dflash_jax.generation import Generation
from dflash_jax.text import encode

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def pair(golden, tmp_path_factory):
    """A golden target with a tokenizer of single bytes, and its draft."""
    root = tmp_path_factory.mktemp("pair")
    target, draft = root / "target", root / "draft"
    shutil.copytree(golden / "targets" / "qwen3_gqa", target)
    shutil.copytree(golden / "drafts" / "dflash_full", draft)
    wrapped = byte_tokenizer(TEMPLATE)
    wrapped.save_pretrained(target)
    return ["--target", str(target), "--draft", str(draft)], target, draft


def run(capsys, *argv):
    """Exit status, stdout, stderr."""
    status = main([str(a) for a in argv])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_generate_prints_the_same_text_with_and_without_the_draft(pair, capsys):
    args, target, _ = pair
    status, text, _ = run(capsys, "generate", "Hello", *args, "--max-new-tokens", 20)
    plain = run(
        capsys, "generate", "Hello", "--target", target, "--draft", "none", "--max-new-tokens", 20
    )
    assert status == 0
    assert text.strip()
    assert plain[:2] == (0, text)


def test_what_stderr_says_of_an_answer_stands_behind_it(pair, monkeypatch):
    both = io.BytesIO()  # as with 2>&1, where stdout alone waits for its buffer to fill
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(both)))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(both, write_through=True))
    assert main(["generate", "Hello", *pair[0], "--max-new-tokens", "12", "--stats"]) == 0
    assert re.search(r"\n12 tokens in .* ended by length\n$", both.getvalue().decode())


def test_generate_as_json_says_what_was_done(pair, capsys):
    args, _, _ = pair
    status, out, err = run(
        capsys, "generate", "Hello", *args, "--max-new-tokens", 12, "--json", "--stats"
    )
    result = json.loads(out)
    assert status == 0
    assert result["tokens"] == len(result["token_ids"]) == 1 + sum(result["rounds"])
    assert result["finish"] == "length"
    assert result["acceptance_length"] == pytest.approx(
        sum(result["rounds"]) / len(result["rounds"])
    )
    assert "acceptance length" in err


@pytest.mark.parametrize(
    ("module", "name", "pieces", "said"),
    [
        ("decoding", "load_target", None, ""),
        ("decoding", "load_draft", None, ""),
        ("generate", "stream", [], ""),  # while it compiles
        ("generate", "stream", ["H", "ello"], "H\x1b[32mell\x1b[39mo"),
    ],
    ids=["target", "draft", "compiling", "answer"],
)
def test_ctrl_c_ends_generate_with_130_and_a_terminal_as_it_was(
    pair, module, name, pieces, said, monkeypatch
):
    def interrupted(*_, **__):
        yield from map(byte_tokenizer(TEMPLATE).encode, pieces)
        raise KeyboardInterrupt

    def at_once(*_, **__):
        raise KeyboardInterrupt

    out, err = io.StringIO(), io.StringIO()
    out.isatty = err.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own
    place = importlib.import_module(f"dflash_jax.cli.{module}")
    monkeypatch.setattr(place, name, at_once if pieces is None else interrupted)
    assert main(["generate", "Hello", "--stats", *pair[0]]) == 130
    assert out.getvalue() == said
    shown = err.getvalue()
    assert shown.endswith("interrupted\n")
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") > -1  # the cursor


def test_a_terminal_is_told_how_many_bytes_were_read(pair, monkeypatch):
    told = {}

    @contextlib.contextmanager
    def working(what):
        counts = told[what.split()[2] if "loading" in what else what] = []
        yield lambda *count: counts.append(count)

    monkeypatch.setattr(command, "working", working)
    assert main(["generate", "Hello", *pair[0], "--max-new-tokens", "4"]) == 0
    for kind, folder in (("target", pair[1]), ("draft", pair[2])):
        names = dict(hf.read_tensors(folder))
        read, totals = zip(*told[kind])
        assert len(read) >= len(names) - 1  # without a tied head
        assert list(read) == sorted(set(read))
        assert {*totals} == {read[-1]}  # exact from the first leaf on


def test_both_checkpoints_are_fetched_before_anything_is_drawn_or_read(pair, monkeypatch):
    # Downloads have bars of their own.
    done = []

    def fetch(ref, patterns):
        done.append(ref)
        return pair[1] if ref == "org/target" else pair[2]

    @contextlib.contextmanager
    def working(what):
        done.append(" ".join(what.split()[:3]))
        yield None

    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.setattr(command, "working", working)
    argv = ["generate", "Hello", "--target", "org/target", "--draft", "org/draft"]
    assert main([*argv, "--max-new-tokens", "0"]) == 0
    assert done[:4] == ["org/target", "org/draft", "loading the target", "loading the draft"]


def test_a_row_without_rounds_is_still_json(pair, capsys):
    args, _, _ = pair
    status, out, _ = run(capsys, "generate", "Hello", *args, "--max-new-tokens", 0, "--json")
    assert status == 0
    assert json.loads(out)["acceptance_length"] is None


def test_raw_and_system_change_the_prompt():
    class Fake:
        chat_template = TEMPLATE

        def encode(self, text):
            return list(text.encode())

        def apply_chat_template(self, messages, **_):
            return self.encode("".join(f"{m['role']}:{m['content']};" for m in messages))

    assert bytes(encode(Fake(), "hi", raw=True)) == b"hi"
    assert bytes(encode(Fake(), "hi")) == b"user:hi;"
    assert bytes(encode(Fake(), "hi", system="be brief")) == b"system:be brief;user:hi;"


def edit(folder, change, tmp_path):
    """A copy of a checkpoint with another config."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


DRAFT_FAULTS = {
    "mask_token_id": lambda c: c["dflash_config"].pop("mask_token_id"),
    "block_size": lambda c: c["dflash_config"].pop("block_size"),
    "target_layer_ids": lambda c: c["dflash_config"].pop("target_layer_ids"),
    "hidden_size": lambda c: c.update(hidden_size=64),
    "vocab_size": lambda c: c.update(vocab_size=300),
    "q_proj": lambda c: c.update(num_attention_heads=8),
}


@pytest.mark.parametrize("field", sorted(DRAFT_FAULTS))
def test_a_faulty_draft_is_one_clear_line(pair, field, capsys, tmp_path):
    _, target, draft = pair
    copy = edit(draft, DRAFT_FAULTS[field], tmp_path)
    status, out, err = run(capsys, "generate", "Hello", "--target", target, "--draft", copy)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert field in err


BAD_ARGUMENTS = {
    "no such folder": (
        ["generate", "x", "--target", "/no/such/folder", "--draft", "none"],
        "/no/such/folder",
    ),
    "target alone": (["generate", "x", "--target", "TARGET"], "--draft"),
    "empty prompt": (["generate", "", "--raw", "PAIR"], "empty"),
    "prompt too long": (["generate", "x" * 600, "--raw", "PAIR"], "positions"),
    "block too large": (["generate", "x", "PAIR", "--block-size", "7"], "block_size"),
    "no block": (["generate", "x", "PAIR", "--block-size", "0"], "block_size"),
    "negative count": (["generate", "x", "PAIR", "--max-new-tokens", "-1"], "max_new_tokens"),
    "tap ids": (["generate", "x", "PAIR", "--target-layer-ids", "1,x"], "1,x"),
    "no prompts": (["bench", "PAIR", "--prompts", "/no/prompts.jsonl"], "/no/prompts.jsonl"),
    "bench without draft": (["bench", "--target", "TARGET", "--draft", "none"], "none"),
}


@pytest.mark.parametrize("name", sorted(BAD_ARGUMENTS))
def test_a_mistake_is_one_clear_line(pair, name, capsys):
    args, target, _ = pair
    argv, word = BAD_ARGUMENTS[name]
    argv = [
        b for a in argv for b in (args if a == "PAIR" else [str(target) if a == "TARGET" else a])
    ]
    status, out, err = run(capsys, *argv)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert word in err


def test_bench_compares_equal_outputs(pair, capsys, tmp_path):
    args, _, _ = pair
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in ("one", "two and three", "four"))
    )
    status, out, _ = run(
        capsys, "bench", *args, "--prompts", prompts, "--max-new-tokens", 24, "--json"
    )
    report = json.loads(out)
    assert status == 0
    assert report["prompts"] == report["equal"] == 3
    assert report["tokens"] == 72
    # Every token but each prompt's first belongs to a round.
    counts = {int(k): n for k, n in report["histogram"].items()}
    assert sum(k * n for k, n in counts.items()) == 72 - 3
    assert report["acceptance_length"] == pytest.approx(69 / sum(counts.values()))
    contexts = report["by_context"].values()
    assert sum(n for n, _ in contexts) == sum(counts.values())
    assert sum(n * length for n, length in contexts) == pytest.approx(69)
    assert report["block_size"] == 6


def test_acceptance_is_told_by_the_tokens_before_a_round():
    out = Generation([[0] * 8], ["length"], [[1, 4, 2]])  # rounds behind 4, 5 and 9 tokens
    long = Generation([[0] * 4], ["stop"], [[3]])  # behind 16
    found = bench.by_context([[0] * 3, [0] * 15], [out, long])
    assert found == {4: (1, 1), 8: (1, 4), 16: (2, 2.5)}


def test_bench_fails_when_outputs_differ(pair, capsys, tmp_path, monkeypatch):
    args, _, _ = pair
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": "one"}) + "\n")
    honest = bench.generate

    def broken(target, draft, **kwargs):
        out = honest(target, draft, **kwargs)
        if draft is not None:
            out.tokens[0][-1] += 1
        return out

    monkeypatch.setattr(bench, "generate", broken)
    status, out, _ = run(capsys, "bench", *args, "--prompts", prompts, "--max-new-tokens", 8)
    assert status == 1
    assert "equal on 0 of 1" in out


def test_a_prompt_file_must_hold_texts(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "fine"}\n{"prompt": "not"}\n')
    with pytest.raises(ValueError, match="line 2"):
        bench.read_prompts(str(path))
    path.write_text("")
    with pytest.raises(ValueError, match="no prompts"):
        bench.read_prompts(str(path))


@pytest.mark.parametrize("name", bench.SETS)
def test_the_named_sets_are_there(name):
    texts = bench.read_prompts(name)
    assert len(texts) >= 32
    assert len(set(texts)) == len(texts)
