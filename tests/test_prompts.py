import collections
import json
import sys

import pytest

from train import prompts
from train.prompts import KINDS, Prompt, build, evaluation_shingles, shingles, split

COUNTS = {"chat": 120, "math": 60, "code": 60}


@pytest.fixture(scope="module")
def built():
    return build(COUNTS, 0)


def test_the_same_seed_builds_the_same_prompts_and_another_seed_others(built):
    assert build(COUNTS, 0) == built
    other = build(COUNTS, 1)
    assert len({p.id for p in other} & {p.id for p in built}) < len(built) / 2


def test_without_reasoning_gym_one_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"reasoning_gym: pip install -e '\.\[prompts\]'"):
        build(COUNTS, 0)


def test_there_are_as_many_distinct_prompts_of_each_kind_as_asked_for(built):
    assert collections.Counter(p.kind for p in built) == COUNTS
    assert len({prompts.normalise(p.text) for p in built}) == len(built)
    assert len({p.id for p in built}) == len(built)
    assert [p.kind for p in built[:30]] != sorted(p.kind for p in built[:30]), "kinds are not mixed"


def test_no_prompt_shares_ten_words_with_an_evaluation_text(built):
    banned = evaluation_shingles()
    assert len(banned) > 1000
    assert not [p.id for p in built if shingles(p.text) & banned]


def test_a_candidate_with_an_evaluation_text_inside_is_refused():
    text = json.loads(prompts.BENCHMARK_FILES[1].read_text(encoding="utf-8").split("\n")[0])["text"]
    family = prompts.Family(1.0, [("a", "Please answer. " + text), ("b", "How are you?")])
    chosen = prompts._choose("chat", 1, {"x": family}, evaluation_shingles())
    assert [p.text for p in chosen] == ["How are you?"]


def test_shingles_are_blind_to_numbers_case_and_marks():
    a = "The cat, number 7, sat on the mat near my door."
    b = "the CAT number 12345 sat on the mat near my door"
    assert shingles(a) == shingles(b) != set()
    assert not shingles("1 2 3 4 5 6 7 8 9 10 11 12"), "mostly numbers"
    assert not shingles("too few words")


def test_split_keeps_whole_groups_apart_and_holds_out_one_a_group(built):
    def group(p: Prompt) -> str:
        return p.id.split("-")[1]

    train, held_out = split(built, 1)
    assert collections.Counter(p.kind for p in held_out) == dict.fromkeys(KINDS, 1)
    assert not {group(p) for p in train} & {group(p) for p in held_out}
    assert not {p.text for p in train} & {p.text for p in held_out}
    assert 0.85 * len(built) < len(train) < len(built)
    assert split(built, 1) == (train, held_out)
    assert split(built, 0) == (train, [])


def test_more_held_out_prompts_than_reserved_groups_are_an_error(built):
    with pytest.raises(ValueError, match="held_out_per_kind=50"):
        split(built, 50)


def test_what_is_held_out_stays_held_out_whatever_else_is_built(built):
    train, _ = split(built, 0)
    dropped = {p.text for p in built} - {p.text for p in train}
    others, _ = split(build({"chat": 200, "code": 90}, 0), 0)
    assert dropped
    assert not dropped & {p.text for p in others}


def test_the_committed_held_out_prompts_are_never_trained_on(built):
    lines = (prompts._DATA / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = [Prompt(**json.loads(line)) for line in lines]
    train, _ = split(built, 0)
    assert split(held_out, 0)[0] == [], "a committed held-out prompt is not of a reserved group"
    assert not {p.id for p in held_out} & {p.id for p in train}
    assert not {prompts.normalise(p.text) for p in held_out} & {prompts.normalise(p.text) for p in train}  # fmt: skip


def test_an_unknown_kind_and_too_many_prompts_are_errors():
    with pytest.raises(ValueError, match="poems"):
        build({"poems": 1}, 0)
    with pytest.raises(ValueError, match="distinct prompts"):
        prompts._choose("chat", 3, {"x": prompts.Family(1.0, [("a", "One?")])}, set())


@pytest.mark.parametrize("path", prompts.EVALUATION_FILES, ids=lambda p: p.stem)
def test_evaluation_files_are_well_formed(path):
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    rows = [json.loads(line) for line in lines]
    assert len(rows) == (48 if path.stem == "held_out" else 32)
    for row in rows:
        assert set(row) == {"id", "kind", "text", "source"}
        assert all(isinstance(v, str) and v.strip() for v in row.values())
    assert len({r["id"] for r in rows}) == len({r["text"] for r in rows}) == len(rows)
    kinds = collections.Counter(r["kind"] for r in rows)
    expected = dict.fromkeys(KINDS, 16) if path.stem == "held_out" else {path.stem: 32}
    assert kinds == expected


def test_prompts_are_written_whole_or_not_at_all(tmp_path, built):
    path = tmp_path / "new" / "prompts.jsonl"
    prompts.write_jsonl(path, built)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [Prompt(**r) for r in rows] == built
    with pytest.raises(TypeError):
        prompts.write_jsonl(path, [*built[:2], "no prompt"])
    assert len(path.read_text(encoding="utf-8").split("\n")) == len(built) + 1


def test_the_command_writes_both_files(tmp_path, capsys):
    prompts.main([str(tmp_path), "--chat", "60", "--math", "30", "--code", "0", "--held-out", "1"])
    assert {p.name for p in tmp_path.iterdir()} == {"train.jsonl", "held_out.jsonl"}
    assert "chat/" in capsys.readouterr().out
