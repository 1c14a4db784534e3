import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from fakes import prompts_of
from training import STOP, TAPS, taps_of, tiny_target

import train.regenerate
from dflash_jax.generation import generate
from dflash_jax.sampling import Sampling
from dflash_jax.states import PREFILL_CHUNK
from train.features import with_features
from train.regenerate import answer_prompts, main, read_prompts, regenerate
from train.store import read_shard, shard_paths, write_shard

NEW, SIZE = 12, 100
TARGET = tiny_target()
LENGTHS = (3, 11, 1, 7, 20, 5, 14)


def numbered(*lengths: int):
    return [(f"p{i}", ("chat", "math")[i % 2], ids) for i, ids in enumerate(prompts_of(*lengths))]


def regenerated(prompts, rows, refill, **options):
    sizes = {"rows": rows, "refill": refill, "max_new_tokens": NEW, "size": SIZE}
    return list(regenerate(TARGET, prompts, TAPS, **sizes, **options))


@pytest.fixture(scope="module")
def plain():
    """Each prompt's answer, decoded alone."""
    prompts = numbered(*LENGTHS)
    return {
        name: generate(TARGET, None, [ids], max_new_tokens=NEW).tokens[0]
        for name, _, ids in prompts
    }


def test_the_prompts_end_by_a_stop_and_by_their_length(plain):
    ends = {tokens[-1] == STOP for tokens in plain.values()}
    assert ends == {True, False}, "the target of these tests should do both"


@pytest.mark.deep
@pytest.mark.parametrize(("rows", "refill"), [(2, 2), (4, 2), (4, 1), (8, 4)])
def test_every_prompt_is_answered_once_and_as_if_it_were_alone(plain, rows, refill):
    prompts = numbered(*LENGTHS)
    examples = regenerated(prompts, rows, refill)
    assert sorted(e.id for e in examples) == sorted(name for name, _, _ in prompts)
    known = {name: (kind, ids) for name, kind, ids in prompts}
    for e in examples:
        kind, ids = known[e.id]
        assert (e.kind, e.prompt_length) == (kind, len(ids))
        assert e.tokens.tolist() == ids + plain[e.id]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_fewer_prompts_than_rows_leave_rows_empty(plain, count):
    examples = regenerated(numbered(*LENGTHS)[:count], 4, 2)
    assert sorted(e.id for e in examples) == [f"p{i}" for i in range(count)]
    for e in examples:
        assert e.tokens[e.prompt_length :].tolist() == plain[e.id]


def test_features_are_the_taps_of_a_fresh_forward_and_the_last_tokens_are_zero():
    """Within bfloat16, in which they are kept; rows hold no remains of those that they replaced."""
    for e in regenerated(numbered(*LENGTHS, PREFILL_CHUNK - 30), 2, 1):
        assert e.features.shape == (len(e.tokens), len(TAPS) * TARGET.config.hidden_size)
        assert e.features.dtype == jnp.bfloat16
        expected = taps_of(TARGET, e.tokens.tolist())
        np.testing.assert_allclose(
            e.features[:-1].astype(np.float32), expected[:-1], rtol=2**-7, atol=1e-4
        )
        assert not e.features[-1].astype(np.float32).any()


@pytest.mark.deep
def test_answers_without_taps_are_the_same(plain):
    sizes = {"rows": 2, "refill": 1, "max_new_tokens": NEW, "size": SIZE}
    for e in regenerate(TARGET, numbered(*LENGTHS), (), **sizes):
        assert e.tokens[e.prompt_length :].tolist() == plain[e.id]
        assert e.features.shape == (len(e.tokens), 0)


@pytest.mark.deep
def test_features_come_in_the_order_of_the_taps_asked_for():
    prompts = numbered(4)
    both = [
        next(regenerate(TARGET, prompts, taps, rows=1, refill=1, max_new_tokens=NEW, size=SIZE))
        for taps in ((0, 2), (2, 0))
    ]
    width = TARGET.config.hidden_size
    np.testing.assert_array_equal(both[0].features[:, :width], both[1].features[:, width:])
    assert np.any(both[0].features[:, :width] != both[0].features[:, width:])


def test_sampled_answers_are_of_the_seed_and_the_prompts_id(plain):
    def answers(prompts, seed=0, **sampling):
        found = regenerated(prompts, 2, 1, sampling=Sampling(**sampling), seed=seed)
        return {e.id: e.tokens[e.prompt_length :].tolist() for e in found}

    prompts = numbered(*LENGTHS)
    hot = answers(prompts, temperature=1.5)
    assert hot != plain
    assert answers(prompts[::-1][:3], temperature=1.5) == {n: hot[n] for n in ("p4", "p5", "p6")}
    assert answers(prompts, seed=1, temperature=1.5) != hot
    assert answers(prompts, temperature=1.5, top_k=1) == plain
    twice = [("a", "chat", prompts[4][2]), ("b", "chat", prompts[4][2])]
    assert len({tuple(t) for t in answers(twice, temperature=1.5).values()}) == 2


@pytest.mark.parametrize(
    ("prompts", "rows", "message"),
    [
        ([("long", "chat", [1] * (SIZE - PREFILL_CHUNK + 1))], 2, "'long' has 37 tokens and needs 101"),
        ([("none", "chat", [])], 2, "'none' has 0 tokens"),
        ([("p", "chat", [1])], 3, "rows=3 is not a multiple of refill=2"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_run_are_an_error_before_anything_runs(prompts, rows, message):
    with pytest.raises(ValueError, match=message):
        regenerated(prompts, rows, 2)


class Tokenizer:
    """One token a letter."""

    def get_vocab(self):
        return {"a": 0}

    def apply_chat_template(self, messages, *, add_generation_prompt, return_dict):
        assert add_generation_prompt
        assert not return_dict
        assert messages[-1]["role"] == "user"
        return [1 + ord(c) % 40 for c in "".join(m["content"] for m in messages)]


@pytest.fixture(scope="module")
def responses(tmp_path_factory):
    """Answers with their features, and the same read from a shard that holds responses only."""
    whole = regenerated(numbered(*LENGTHS), 2, 1)
    folder = tmp_path_factory.mktemp("responses")
    write_shard(folder, 0, [dataclasses.replace(e, features=e.features[:, :0]) for e in whole], ())
    return whole, list(read_shard(folder / "00000.safetensors", ()))


def test_replayed_responses_have_the_features_they_were_made_with(responses):
    whole, bare = responses
    assert {e.features.shape[1] for e in bare} == {0}
    replayed = {e.id: e for e in with_features(TARGET, bare, TAPS, rows=2)}
    assert len(replayed) == len(whole)
    for e in whole:
        again = replayed[e.id]
        assert (again.kind, again.prompt_length) == (e.kind, e.prompt_length)
        np.testing.assert_array_equal(again.tokens, e.tokens)
        # Chunks of prefill sum in another order than single steps, and both are rounded to bfloat16.
        a, b = (x.features[:].astype(np.float32) for x in (again, e))
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


def test_known_responses_are_not_answered_again(prompt_file, responses, tmp_path, monkeypatch):
    asked = []
    real = train.regenerate.regenerate

    def spy(target, prompts, *args, max_new_tokens, **options):
        asked.append((max_new_tokens, sorted(name for name, _, _ in prompts)))
        return real(target, prompts, *args, max_new_tokens=max_new_tokens, **options)

    monkeypatch.setattr(train.regenerate, "regenerate", spy)
    known = [e for e in responses[1] if e.id in ("p1", "p4", "p6")]  # p6 is none of the file's
    options = {"rows": 2, "refill": 1, "max_new_tokens": NEW, "size": SIZE}
    answer_prompts(TARGET, prompt_file, tmp_path / "out", TAPS, responses=known, **options)
    assert asked == [(NEW, ["p0", "p3", "p5"])]
    tokens = {e.id: e.tokens.tolist() for e in stored(tmp_path / "out")}
    assert sorted(tokens) == ["p0", "p1", "p3", "p4", "p5"]
    assert all(tokens[e.id] == e.tokens.tolist() for e in known if e.id != "p6")


@pytest.fixture
def prompt_file(tmp_path, monkeypatch):
    monkeypatch.setattr(train.regenerate, "load_tokenizer", lambda target: Tokenizer())
    path = tmp_path / "prompts.jsonl"
    texts = ["hello", "a line\u2028in two", "x" * 90, "good day", "why", "tell me"]
    rows = [{"id": f"p{i}", "kind": "chat", "text": t} for i, t in enumerate(texts)]
    path.write_text(
        "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8"
    )
    return path


def answer(prompt_file, out):
    answer_prompts(TARGET, prompt_file, out, TAPS, rows=2, refill=1, max_new_tokens=NEW, size=SIZE)


def stored(out):
    return [e for path in shard_paths(out) for e in read_shard(path, TAPS)]


def test_prompts_are_read_whole_and_too_long_ones_are_left_out_and_counted(prompt_file, capsys):
    prompts = read_prompts(prompt_file, Tokenizer(), 36)
    assert [p[0] for p in prompts] == ["p0", "p1", "p3", "p4", "p5"]
    assert len(prompts[1][2]) == len("a line\u2028in two")
    assert "1 prompts of over 36 tokens left out" in capsys.readouterr().err


def test_a_file_of_prompts_that_are_all_too_long_is_an_error(prompt_file, tmp_path):
    prompt_file.write_text(json.dumps({"text": "long " * 30}))
    with pytest.raises(ValueError, match=rf"no prompt of up to 36 tokens, what size={SIZE} leaves"):
        answer(prompt_file, tmp_path / "out")


def test_a_conversations_last_question_is_asked_again(tmp_path):
    first = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    again = [{"role": "user", "content": "Why"}, {"role": "assistant", "content": "So"}]
    share = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    rows = [
        {"messages": first + again}, {"messages": first + again[:1], "id": "x"},
        {"conversations": share, "kind": "math"}, {"text": "Hi", "id": 7},
    ]  # fmt: skip
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows))
    asked = [[1 + ord(c) % 40 for c in text] for text in ("HiHoWhy", "HiHoWhy", "Hi", "Hi")]
    assert read_prompts(path, Tokenizer(), 36) == [
        ("chats.jsonl, line 1", "chats", asked[0]),
        ("x", "chats", asked[1]),
        ("chats.jsonl, line 3", "math", asked[2]),
        ("7", "chats", asked[3]),
    ]
    path.write_text(json.dumps(rows[1]) + "\n" + json.dumps({"text": "a", "id": "x"}))
    with pytest.raises(ValueError, match=r"chats\.jsonl, line 2: another line has the id 'x' too"):
        read_prompts(path, Tokenizer(), 36)
    path.write_text(json.dumps({"messages": first[1:]}))
    with pytest.raises(ValueError, match="line 1: messages has no user or tool turn"):
        read_prompts(path, Tokenizer(), 36)


def test_answers_of_another_target_are_not_added_to(prompt_file, tmp_path):
    answer(prompt_file, tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"index\.json: the features' target is \w{64}, not \w{64}"
    ):
        answer_prompts(
            tiny_target(1), prompt_file, tmp_path / "out", TAPS,
            rows=2, refill=1, max_new_tokens=NEW, size=SIZE,
        )  # fmt: skip


def test_an_interrupted_run_goes_on_with_the_prompts_that_have_no_answer(
    prompt_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(train.regenerate, "EXAMPLES_A_SHARD", 2)
    real, asked = train.regenerate.regenerate, []

    def interrupted(target, prompts, *args, **options):
        asked.append([name for name, _, _ in prompts])
        for i, example in enumerate(real(target, prompts, *args, **options)):
            if len(asked) == 1 and i == 3:
                raise KeyboardInterrupt
            yield example

    monkeypatch.setattr(train.regenerate, "regenerate", interrupted)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        answer(prompt_file, out)
    first = {e.id for e in stored(out)}
    assert len(first) == 2
    answer(prompt_file, out)
    assert not first & set(asked[1])
    assert sorted(e.id for e in stored(out)) == ["p0", "p1", "p3", "p4", "p5"]
    answer(prompt_file, out)
    assert len(asked) == 2, "nothing is left to answer"
    answer(prompt_file, tmp_path / "whole")
    whole = {e.id: e for e in stored(tmp_path / "whole")}
    for e in stored(out):
        np.testing.assert_array_equal(e.tokens, whole[e.id].tokens)


@pytest.mark.parametrize("line", ['{"id": "a", "kind": "chat"}', "[1]", "no json"])
def test_a_malformed_prompt_file_is_one_line_of_error(tmp_path, monkeypatch, capsys, line):
    monkeypatch.setattr(train.regenerate, "load_tokenizer", lambda target: Tokenizer())
    monkeypatch.setattr(train.regenerate, "load_target", lambda ref: TARGET)
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
    assert main([str(tmp_path / "prompts.jsonl"), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
