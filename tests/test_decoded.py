import dataclasses

import jax
import jax.numpy as jnp
import pytest
from fakes import leaves_equal
from runs import TARGET, checkpoint, records

from dflash_jax.decode import decode, prefill
from dflash_jax.generation import generate
from dflash_jax.pair import load_draft
from train.config import TrainConfig
from train.decoded import choose, decode_examples, draft_in_memory
from train.evaluate import block_correct
from train.run import decodes_at, evaluate_all


@pytest.fixture(autouse=True)
def _in_the_runs_mesh(straight):
    """Where the run's own programs are."""
    with jax.set_mesh(straight.mesh):
        yield


def decoded(setup, draft):
    examples = setup.held_out["held_out"]
    return decode_examples(setup.target, draft, examples, setup.config.max_new_tokens)


def in_memory(setup, step=6):
    state = checkpoint(setup, step)
    return draft_in_memory(setup.module.config, state.params, state.feature_scale)


def test_the_decoded_text_is_the_targets_own(straight):
    done = decoded(straight, in_memory(straight))
    for example, row in zip(done.examples, done.rows):
        assert row.tokens == example.tokens[example.prompt_length :].tolist()
        assert sum(row.rounds) + 1 == len(row.tokens)


def test_the_exported_draft_decodes_as_it_did_in_memory_and_in_the_metrics(straight):
    """To the bit: the best draft of the run is that of step 6, the only one that was decoded."""
    memory, exported = in_memory(straight), load_draft(f"{straight.config.run}/draft", TARGET)
    assert exported.config == memory.config
    assert leaves_equal(exported.params, memory.params)
    places = jax.tree.map(lambda x: x.sharding, memory.params)
    exported = dataclasses.replace(exported, params=jax.device_put(exported.params, places))
    done = decoded(straight, exported)
    assert done.rows == decoded(straight, memory).rows
    last = records(straight.config.run)[-1]
    assert last["decoded"]["held_out"] == done.acceptance_length
    forced = last["acceptance_length"]["held_out"]  # the same two examples
    assert last["gap"]["held_out"] == pytest.approx(forced - done.acceptance_length)


def test_decoding_is_that_of_generate(straight):
    prompts = [e.tokens[: e.prompt_length].tolist() for e in straight.held_out["held_out"]]
    draft = in_memory(straight)
    out = generate(straight.target, draft, prompts, max_new_tokens=straight.config.max_new_tokens)
    done = decoded(straight, draft)
    assert (out.tokens, out.rounds) == ([r.tokens for r in done.rows], done.rounds)
    assert out.acceptance_length == done.acceptance_length


def test_a_better_draft_is_accepted_more_often_and_the_gap_sees_a_wrong_one(straight):
    """A draft that predicts nothing has one token a round, whatever the trainer's own measure."""
    state = checkpoint(straight, 6)
    ruined = {**state.params, "norm": {"weight": jnp.zeros_like(state.params["norm"]["weight"])}}
    draft = draft_in_memory(straight.module.config, ruined, state.feature_scale)
    assert decoded(straight, draft).acceptance_length < 1.2


def test_further_evaluations_compile_nothing(straight):
    evaluate_all(straight, checkpoint(straight, 4), decode=True)
    before = [f._cache_size() for f in (prefill, decode, block_correct)]
    values, _ = evaluate_all(straight, checkpoint(straight, 6), decode=True)
    assert [f._cache_size() for f in (prefill, decode, block_correct)] == before
    assert values.keys() == {"acceptance_length", "decoded", "gap"}


def test_batches_that_do_not_come_out_even_give_the_same_rows(straight):
    draft, target, examples = in_memory(straight), straight.target, straight.examples[:3]
    limit = straight.config.max_new_tokens
    first, last = (decode_examples(target, draft, examples[i : i + 2], limit).rows for i in (0, 1))
    found = decode_examples(target, draft, examples, limit, rows=2).rows
    assert found == [*first, last[1]]
    assert first[1] == last[0] != last[1]


def test_chosen_examples_lie_evenly():
    assert choose(range(10), 4) == [0, 2, 5, 7]
    assert choose(range(3), 8) == [0, 1, 2]


def test_every_nth_evaluation_decodes_and_the_last(tmp_path):
    config = TrainConfig(run=str(tmp_path), steps=100, evaluate_every=20, decode_every=2)
    assert [s for s in (20, 40, 60, 80, 100) if decodes_at(config, s)] == [40, 80, 100]
    never = TrainConfig(run=str(tmp_path), steps=100, evaluate_every=20, decode_every=0)
    assert not any(decodes_at(never, s) for s in (20, 40, 100))


def test_samples_have_the_text_cut_by_rounds(straight):
    (row, *others) = records(straight.config.run, "samples.jsonl")
    assert [r["step"] for r in (row, *others)] == [6, 6]
    example = straight.held_out["held_out"][0]
    answer = example.tokens[example.prompt_length :]
    assert "".join(row["pieces"]).split() == [str(t) for t in answer]
    assert row["prompt"].split() == [str(t) for t in example.tokens[: example.prompt_length]]
    assert [len(p.split()) for p in row["pieces"]] == [1, *row["rounds"]]
    assert (row["id"], row["set"], row["finish"]) == (example.id, "held_out", row["finish"])
