"""The accelerator's benchmark: what it reckons with, and that all of it runs at tiny sizes."""

import dataclasses
import gc
import json

import jax
import numpy as np
import pytest

from benchmarks import accelerator as bench

QWEN3_8B, QWEN3_4B = bench.FULL.models.values()


def test_the_dictated_rounds_have_the_published_spread_and_the_mean_of_the_bar():
    counts = bench.committed(640, seed=0)
    assert sum(counts) == 640 * 6.5
    assert set(counts) == set(range(1, bench.BLOCK + 1))
    share = np.bincount(counts, minlength=17)[1:] / 640
    np.testing.assert_allclose(share, np.array(bench.COMMITTED) / 100, atol=0.12)
    assert counts != bench.committed(640, seed=1)


def test_a_script_is_wrong_where_a_round_is_to_end():
    said = bench.script([3, 1, 2], used=5, size=14, token=7)
    assert said.tolist() == [7, 7, 7, 7, 7, 7, 7, 8, 8, 7, 8, 7, 7, 7]


@pytest.mark.parametrize(("config", "gigabytes"), [(QWEN3_8B, 15.14), (QWEN3_4B, 8.04)])
def test_the_floor_reads_every_weight_once_and_the_cache(config, gigabytes):
    """Against the published parameter counts, without the embedding where it is not the head."""

    def read(layers, used):
        shallow = dataclasses.replace(config, num_hidden_layers=layers, layer_types=())
        return bench.bytes_a_token(shallow, used)

    layer = read(2, 0) - read(1, 0)
    assert read(1, 0) + 35 * layer == pytest.approx(gigabytes * 1e9, rel=1e-3)
    assert 36 * (read(1, 1000) - read(1, 0)) == 147_456_000


@pytest.mark.parametrize(
    ("config", "length", "anchors", "teraflops"),
    [(QWEN3_8B, 768, 256, 35), (QWEN3_8B, 3072, 512, 73), (QWEN3_4B, 3072, 512, 42)],
)
def test_a_training_steps_products_are_counted(config, length, anchors, teraflops):
    """Against figures reckoned apart, of whole teraflops."""
    draft = bench.draft_config(config, 5)
    flops = bench.training_flops(draft, length, anchors, visible=length / 2)
    assert flops / 1e12 == pytest.approx(teraflops, rel=0.05)


def test_the_bars_are_printed_beside_what_was_measured():
    result = {
        "qwen3-8b": {"plain, share of the floor": 0.72, "verify(16) / plain": 1.2},
        "training": {"share of peak": 0.31},
    }
    lines = [line.split() for line in bench.table(result).splitlines()]
    assert [line[-4:] for line in lines[1:]] == [
        ["0.72", ">=", "0.7", "met"], ["1.2", "<=", "1.15", "missed"], ["0.31", ">=", "0.35", "missed"],
    ]  # fmt: skip


@pytest.mark.deep
def test_all_of_it_runs_at_tiny_sizes_and_leaves_nothing_behind(capsys):
    before = {id(x) for x in jax.live_arrays()}
    bench.main(["--tiny", "--rounds", "1", "--only", "qwen3-8b", "training"])
    out, _ = capsys.readouterr()
    result = json.loads(out[: out.rindex("}") + 1])
    assert result["qwen3-8b"]["tau"] == 6.5
    names = {name for name, _, _ in bench.BARS if not name.startswith("qwen3-4b")}
    for name in names:
        section, _, what = name.partition(": ")
        assert result[section][what] > 0
        assert name in out
    gc.collect()
    left = [x.nbytes for x in jax.live_arrays() if id(x) not in before]
    assert max(left, default=0) < 4096  # constants; the least matrix has more
