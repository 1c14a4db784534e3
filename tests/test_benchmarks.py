"""The benchmarks' report: README.md says what the committed results say."""

import importlib.util
import json

import pytest

from benchmarks import report, timing
from benchmarks.__main__ import SUITE
from benchmarks.decoding import share_of_ideal


def test_the_readme_says_what_the_results_say():
    text = report.README.read_text()
    assert report.filled(text, report.measured()) == text


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
    took = {"plain": 10.0, "verify(8)": 15.0, "draft(8)": 5.0, "verify(16)": 20.0, "draft(16)": 20.0}  # fmt: skip
    found = {"oracle, block 8": 4.0, "oracle, block 16": 2.0}
    shares = share_of_ideal({"milliseconds": took}, {"over_plain": found})
    assert shares == {8: 1.0, 16: 0.5}


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
