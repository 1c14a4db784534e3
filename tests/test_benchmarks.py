"""The benchmarks' report: README.md and the pages say what the committed results say."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import DRAFT, TARGET, prompts_of, random_draft, random_params, random_target

from benchmarks import quantized, report, timing
from benchmarks.__main__ import SUITE
from benchmarks.decoding import at_length, share_of_ideal
from benchmarks.quantized import CHUNK, in_groups, judge, measure
from dflash_jax import bench, generate
from dflash_jax.adapters import bind
from dflash_jax.cache import KVCache
from dflash_jax.checkpoint import keys, quantization
from dflash_jax.decode import LENGTH
from dflash_jax.pair import Target


def test_the_pages_say_what_the_results_say():
    measured = report.measured()
    assert "costs" in measured[report.README]
    for page, tables in measured.items():
        text = page.read_text()
        assert report.filled(text, tables) == text


def test_every_page_has_a_place_for_its_tables():
    for page, name, _ in report.TABLES:
        assert f"<!-- results: {name} -->\n" in page.read_text()


def test_every_result_says_what_it_ran_on():
    results = sorted(timing.RESULTS.glob("*.json"))
    assert results
    for path in results:
        machine = json.loads(path.read_text())["machine"]
        assert {"device", "cores", "python", "jax", "date"} <= machine.keys()


def test_every_benchmark_of_the_suite_is_there():
    assert [n for n in SUITE if importlib.util.find_spec(f"benchmarks.{n}") is None] == []


def test_a_table_is_put_between_its_marks_alone():
    text = "a\n<!-- results: x -->\nold\n<!-- end -->\nb\n<!-- results: y -->\n<!-- end -->\n"
    new = report.filled(text, {"x": "new\nlines", "y": "z"})
    assert new == (
        "a\n<!-- results: x -->\nnew\nlines\n<!-- end -->\nb\n<!-- results: y -->\nz\n<!-- end -->\n"
    )
    assert report.filled(new, {"x": "new\nlines", "y": "z"}) == new
    with pytest.raises(ValueError, match="no place for 'q'"):
        report.filled(text, {"q": ""})


def test_the_ideal_is_a_round_of_nothing_but_its_parts():
    seconds = {"verify(8)": 8 * 0.03, "draft(8)": 8 * 0.01, "oracle, block 8": 12 * 0.04}
    assert share_of_ideal(seconds, 8) == pytest.approx(1.0)  # 96 tokens in 12 rounds
    assert share_of_ideal(seconds | {"oracle, block 8": 12 * 0.08}, 8) == pytest.approx(0.5)


def test_a_timed_call_runs_the_same_rounds_each_time_though_the_rows_end_in_it(monkeypatch):
    target, draft, ran = random_target(), random_draft(), []

    def decode(*args):
        state = bench_decode(*args)
        ran.append((int(state.rounds[0]), int(state.length[0]), int(state.finish[0])))
        return state

    bench_decode = bench.decode
    monkeypatch.setattr(bench, "decode", decode)
    state = at_length(target, draft, used=20, size=64).replace(limit=jnp.array([40]))
    call = bench.rounds(*bind(target, draft), state, most=1000)
    call(), call()
    assert ran[0] == ran[1]
    rounds, length, finish = ran[0]
    assert (rounds > 1, length, finish) == (True, 40, LENGTH)


def test_the_ways_alternate_and_the_first_round_is_not_counted(monkeypatch):
    clock, called = iter(range(1000)), []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))

    def way(name, costs):
        def call():
            called.append(name)
            for _ in range(next(costs)):
                next(clock)

        return call

    ways = {"a": way("a", iter([90, 1, 2, 9])), "b": way("b", iter([90, 4, 4, 4]))}
    assert timing.alternate(ways, 3) == {"a": 3, "b": 5}
    assert called == ["a", "b"] * 4


def test_a_text_is_judged_in_chunks_as_it_is_whole():
    target = Target(TARGET, random_params(TARGET, 0), (), source=Path())
    (prompt,), count = prompts_of(5), CHUNK + 6
    text = prompt + generate(target, None, [prompt], max_new_tokens=count).tokens[0]
    likeliest, loss = judge(target, text, 256)
    assert likeliest[len(prompt) - 1 :].tolist() == text[len(prompt) :]
    models, params = bind(target, None)
    c, size = TARGET, len(text) + 1
    cache = KVCache.zeros(
        c.num_hidden_layers, 1, c.num_key_value_heads, size, c.head_dim, jnp.float32
    )
    hidden, _, _ = jax.jit(models.target.forward)(params, jnp.asarray([text[:-1]]), cache)
    logits = jax.nn.log_softmax(models.target.logits(params, hidden)[:, 0], axis=0)
    expected = [-logits[token, i] for i, token in enumerate(text[1:])]
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-4)


def test_int4_is_within_half_a_step_of_its_group():
    target = Target(TARGET, random_params(TARGET, 0), (), source=Path())
    weight = np.asarray(target.params["embed_tokens"]["weight"]).reshape(TARGET.vocab_size, -1, 8)
    rounded = np.asarray(in_groups(target, 8).params["embed_tokens"]["weight"]).reshape(
        weight.shape
    )
    step = np.abs(weight).max(axis=2, keepdims=True) / 7
    assert np.all(np.abs(weight - rounded) <= step / 2 * (1 + 1e-5))
    assert np.all([len(np.unique(group)) <= 15 for group in rounded.reshape(-1, 8)])
    np.testing.assert_allclose(rounded / step, np.round(rounded / step), atol=1e-4)


@pytest.mark.deep
def test_a_quantised_target_is_measured_beside_its_float_one(monkeypatch):
    monkeypatch.setattr(quantized, "BLOCKS", (3,))
    monkeypatch.setattr(quantized, "GROUPS", (8,))
    whole = Target(TARGET, random_params(TARGET, 0), (), source=Path())
    leaves = quantization.stream(keys.flatten(whole.params).items())
    order = quantization.paths(keys.expected_shapes(TARGET))
    small = Target(TARGET, keys.build(leaves, order), (), source=Path())
    targets, draft = {"float32": whole, "int8": small}, random_draft(DRAFT)
    found = measure(targets, dict.fromkeys(targets, draft), prompts_of(4, 6), 8)
    assert found["predictions"]["answers"]["float32"]["agreement"] == 1
    assert found["predictions"]["answers"]["tokens"] == 2 * 8
    assert [found["decoding"][name]["3"]["equal_to_plain"] for name in targets] == [2, 2]
    assert found["weights_megabytes"]["int8"] < found["weights_megabytes"]["float32"] / 2
    assert found["compiling"]["int8"]["instructions"] > 0
    lines = report.quantized(found | {"machine": timing.machine()}).split("\n")
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")] == [
        "target", "float32", "int8", "int4, groups of 8", "target", "float32", "float32", "int8", "int8",
    ]  # fmt: skip
