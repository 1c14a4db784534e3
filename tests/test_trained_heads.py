"""Drafts with heads in training: against their trainers' numbers, and against their own decoding."""

import dataclasses
import functools
import json
import re

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from heads import SMALL
from jax.ad_checkpoint import print_saved_residuals
from safetensors.numpy import load_file

from dflash_jax.adapters import bind
from dflash_jax.models import apply
from dflash_jax.models.draft import DFlashDraftModel, first_slot
from dflash_jax.pair import load_draft, load_target
from dflash_jax.sampling import Picker, Sampling
from dflash_jax.states import new_draft_cache, row_sampling
from train.evaluate import block_correct
from train.objective import Objective, Totals, acceptance_length
from train.step import (
    Blocks,
    block_hidden,
    block_loss,
    gradients,
    in_vocabulary,
    make_blocks,
    target_rows,
)
from train.vocabulary import offsets
from train.warm_start import random_params

loss_and_gradients = jax.jit(
    jax.value_and_grad(block_loss, argnums=3, has_aux=True), static_argnums=(0, 1, 2)
)
norm = jax.jit(optax.tree.norm)


@pytest.fixture(scope="module")
def target(golden):
    return load_target(golden / "targets/qwen3_gqa", dtype=jnp.float32)


def read(folder):
    return json.loads((folder / "case.json").read_text()), load_file(folder / "expected.safetensors")  # fmt: skip


def golden_step(golden, target, name, objective, base_share=None, **head):
    """The case, its arrays, and a step of it on its draft, whose head has the given numbers."""
    case, arrays = read(golden / "training" / name)
    draft = load_draft(golden / case["draft"], target, dtype=jnp.float32)
    config = dataclasses.replace(draft.config, head=dataclasses.replace(draft.config.head, **head))
    tokens, features, supervised, anchors, real = (
        jnp.asarray(arrays[k]) for k in ("input_ids", "features", "loss_mask", "anchors", "keep")
    )
    blocks = make_blocks(
        tokens.astype(jnp.int32), features, supervised > 0, anchors.astype(jnp.int32), real, case["block_size"],
        first_slot=first_slot(config),
    )  # fmt: skip
    embedding, lm_head = (target.params[k]["weight"] for k in ("embed_tokens", "lm_head"))
    (loss, totals), grads = loss_and_gradients(
        DFlashDraftModel(config), objective, 7, draft.params, embedding, lm_head, jnp.ones(features.shape[2]), blocks,
        None, base_share,
    )  # fmt: skip
    correct = totals.correct.reshape(blocks.counts.shape)
    whole = blocks.real & blocks.counts.any(axis=2)
    length, count = acceptance_length(correct, blocks.counts, whole, blocks.first_slot)
    labels = blocks.counts.sum()
    values = {
        "loss": loss, "accuracy": (correct & blocks.counts).sum() / labels, "accept_len": length / count,
        "loss_weight": totals.weight, "valid_tokens": labels,
        "grad_q0": grads["layers_0"]["self_attn"]["q_proj"]["weight"], "grad_fc": grads["fc"]["weight"],
        "grad_global_norm": norm(grads),
    }  # fmt: skip
    return case, arrays, totals, grads, blocks, values


def close(case, run, expected, values, but=()):
    for name, value in values.items():
        if name in but or name not in expected:
            continue
        kind = "grad" if name.startswith("grad") else "loss" if name.endswith("loss") else "metrics"
        np.testing.assert_allclose(value, expected[name], **case["tolerances"][kind], err_msg=f"{run}_{name}")  # fmt: skip


@pytest.mark.parametrize("shift", [pytest.param(0, marks=pytest.mark.deep), 1])
@pytest.mark.parametrize("share", [0, 4])
def test_dominos_mixed_loss_is_specforges(golden, target, shift, share):
    case, arrays, _, grads, _, values = golden_step(
        golden, target, "specforge_domino", Objective(gamma=4.0), jnp.float32(share / 10), shift_label=bool(shift)
    )  # fmt: skip
    run = f"shift{shift}_lambda{share}"
    expected = case["runs"][run] | {
        k.removeprefix(f"{run}_"): v for k, v in arrays.items() if k.startswith(run)
    }
    values |= {
        "grad_embed_proj0": grads["embed_proj"]["0"]["weight"],
        "grad_gru_hh": grads["prefix_gru"]["weight_hh_l0"],
        "accuracy_denom": values["valid_tokens"],
    }
    assert {"loss", "grad_gru_hh", "grad_q0", "accept_len"} <= expected.keys()
    close(case, run, expected, values)


@pytest.mark.deep
@pytest.mark.parametrize(("run", "weight"), [("w1", 1.0), ("w03", 0.3)])
def test_dflash2s_loss_is_nemos(golden, target, run, weight):
    case, arrays, totals, grads, blocks, values = golden_step(
        golden, target, "nemo_dflash2", Objective(gamma=4.0, selector_weight=weight)
    )
    expected = {
        k.removeprefix(f"{run}_"): v for k, v in arrays.items() if k.startswith(f"{run}_")
    } | case["runs"][run]
    base, selector = totals.numerators / totals.divisors
    listed = totals.listed.reshape(blocks.counts.shape) & blocks.counts
    values |= {
        "base_loss": base, "selector_loss": selector / weight,
        "candidate_recall": listed.sum() / blocks.counts.sum(),
        "grad_conv0_base": grads["layers_0"]["attention_conv"]["base_kernel"],
        "grad_successor": grads["candidate_selector"]["successor_codebook"],
    }  # fmt: skip
    assert values.keys() <= expected.keys()
    close(case, run, expected, values)


@pytest.mark.parametrize(
    "pure", [pytest.param(0, marks=pytest.mark.deep), 1, pytest.param(2, marks=pytest.mark.deep)]
)
def test_dominos_logits_given_the_true_tokens_are_specforges(golden, target, pure):
    case, arrays = read(golden / "drafts/domino")
    draft = load_draft(golden / "drafts/domino", target, dtype=jnp.float32)
    embedding, head = (target.params[k]["weight"] for k in ("embed_tokens", "lm_head"))
    for i in range(2):
        hidden, tokens = (jnp.asarray(arrays[f"in{i}_{k}"]) for k in ("hidden", "prev_ids"))
        for shift in range(2):
            numbers = dataclasses.replace(draft.config.head, shift_label=bool(shift), pure_draft_prefix_len=pure)  # fmt: skip
            config = dataclasses.replace(draft.config, head=numbers)
            skip = 1 - shift
            table, columns = forced(
                DFlashDraftModel(config), draft.params, hidden[skip:].T[:, None], tokens[None, : len(tokens) - skip], embedding
            )  # fmt: skip
            logits = (head @ hidden[skip:].T + table @ columns[:, 0]).T
            expected = arrays[f"in{i}_shift{shift}_pure{pure}_teacher_logits"][skip:]
            np.testing.assert_allclose(logits, expected, **case["tolerances"]["logits"])


@functools.partial(jax.jit, static_argnums=0)
def forced(module, params, hidden, tokens, embedding):
    def embed(tokens):
        return embedding[tokens].transpose(2, 0, 1)

    return apply(module, params, hidden, tokens, embed, method="forced")


# Against their own decoding: a text that goes on as the draft would is all right to the trainer, and
# one that departs from it after j tokens is right for j.

SLIDE = {"layer_types": ("sliding_attention",), "sliding_window": 6}
deep = pytest.mark.deep
CASES = {
    "plain": {"window_rule": "zlab", **SLIDE},
    "dflash2": {"window_rule": "nemo", "is_causal": False, **SLIDE},
    "domino": {"window_rule": "specforge", **SLIDE},
    "domino unshifted": {"is_causal": True},
    "dspark": {"sample_from_anchor": True, "window_rule": "speculators", **SLIDE},
    "scaled": {
        "sample_from_anchor": True, "output_multiplier": 0.5, "final_logit_softcapping": 3.0,
        "input_embedding_scale": 2.0, "own_embedding": True, "own_head": True, "window_rule": "speculators",
        "is_causal": False, **SLIDE,
    },
    "reduced": {"draft_vocab_size": 20},
    "reduced dspark": {"draft_vocab_size": 20, "sample_from_anchor": True, "head": SMALL["dspark"]},
}  # fmt: skip
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ()}
QUICK = ("dflash2",)
Q, S, ANCHOR = 6, 24, 13
KEPT = np.sort(np.random.default_rng(5).permutation(fakes.VOCAB)[:20])


@functools.partial(jax.jit, static_argnums=(0, 1))
def decoded(fns, block_size, params, context, text, length, cache):
    """What the decoder proposes behind the anchor at `length`."""
    cache = fns.extend(params, context, cache).replace(length=length)
    picker = Picker(row_sampling([Sampling()], None, 1), length, "coupled")
    return fns.propose(params, text, cache, block_size, picker)[0].tokens[0]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else deep) for n in CASES])
def test_the_trainer_accepts_what_the_decoder_proposes(name):
    options = {"head": SMALL.get(name)} | CASES[name]
    config = dataclasses.replace(fakes.DRAFT, block_size=Q, **(ONE_LAYER | options))
    target, draft = fakes.random_target(), fakes.random_draft(config)
    if config.draft_vocab_size:
        draft = dataclasses.replace(
            draft, params=draft.params | {"d2t": jnp.asarray(offsets(KEPT))}
        )
    models, params = bind(target, draft)
    rng = np.random.default_rng(1)
    width = len(config.target_layer_ids) * config.hidden_size
    features = rng.standard_normal((S, width)).astype(np.float32)
    text = rng.integers(fakes.VOCAB, size=S).astype(np.int32)
    context = jnp.asarray(np.where(np.arange(S)[:, None] < ANCHOR, features, 1e3).T[:, None])
    proposals = decoded(
        models.draft, models.block_size, params, context, text[None], jnp.array([ANCHOR], jnp.int32),
        new_draft_cache(draft, 1, 64),
    )  # fmt: skip
    P = config.max_proposals
    assert len(proposals) == P
    rows = np.tile(text, (P + 1, 1))
    rows[:, ANCHOR + 1 : ANCHOR + 1 + P] = proposals
    wrong = (rows + 1) % fakes.VOCAB
    departs = np.arange(S)[None] == ANCHOR + 1 + np.arange(P + 1)[:, None]
    rows = jnp.asarray(np.where(departs, wrong, rows))
    first = first_slot(config)
    blocks = make_blocks(
        rows, jnp.asarray(np.tile(features, (P + 1, 1, 1))), jnp.ones(rows.shape, bool),
        jnp.full((P + 1, 1), ANCHOR), jnp.ones((P + 1, 1), bool), Q, first_slot=first,
    )  # fmt: skip
    d2t = draft.params.get("d2t")
    blocks = in_vocabulary(blocks, d2t)
    head = target_rows(target.params["lm_head"]["weight"], None, d2t)
    correct = block_correct(
        DFlashDraftModel(config), draft.params, target.params["embed_tokens"]["weight"], head, jnp.ones(width), blocks,
        chunk=16,
    )  # fmt: skip
    accepted = [
        int(acceptance_length(correct[j : j + 1], blocks.counts[j : j + 1], blocks.real[j : j + 1], first)[0])
        for j in range(P + 1)
    ]  # fmt: skip
    assert accepted[:P] == list(range(1, P + 1))
    assert accepted[P] > P  # Domino trains a slot more than decoding reads


# What every head keeps.


def small_step(name, rows=4, **options):
    """A draft of a kind, its parameters, random blocks and the rest of `block_loss`'s arguments."""
    head = {"head": SMALL.get(name)}
    config = dataclasses.replace(
        fakes.DRAFT, **{"block_size": Q, "is_causal": False} | ONE_LAYER | head | options
    )
    rng = np.random.default_rng(2)
    width = len(config.target_layer_ids) * config.hidden_size
    supervised = np.arange(S)[None] < np.array([S, 9, 20, 6])[:rows, None]
    blocks = make_blocks(
        jnp.asarray(rng.integers(fakes.VOCAB, size=(rows, S)), jnp.int32),
        jnp.asarray(rng.standard_normal((rows, S, width)), jnp.float32), jnp.asarray(supervised),
        jnp.asarray(np.tile([1, 4, 15], (rows, 1)), jnp.int32), jnp.ones((rows, 3), bool), Q,
        first_slot=first_slot(config),
    )  # fmt: skip
    table = fakes.random_target().params["lm_head"]["weight"]
    return DFlashDraftModel(config), fakes.random_params(config, 1), blocks, (table, table, jnp.ones(width))  # fmt: skip


def test_parts_share_no_divisor():
    """Of rows of one slot, whose loss is w times their label, and for a second term its square."""
    rows = np.array([[3, 1], [5, 0], [2, 1], [7, 1]])  # label, whether it counts
    label, counts = jnp.asarray(rows[:, :1, None]), jnp.asarray(rows[:, 1:, None] > 0)
    flat, features = label[..., 0], jnp.zeros((4, 1, 1))
    blocks = Blocks(features, None, label, flat, flat, label, counts, counts[..., 0], first_slot=0)

    def terms(w, blocks):
        x, n = blocks.labels, blocks.counts
        sums = jnp.stack([(w * x * n).sum(), ((w * x) ** 2 * n * (x > 2)).sum()])
        divisors = jnp.stack([n.sum(), (n * (x > 2)).sum()]).astype(jnp.float32)
        return Totals(sums, divisors, divisors[0], n.reshape(-1))

    run = jax.jit(gradients, static_argnums=(0, 3))
    for parts in (1, 2, 4):
        gradient, loss, sums = run(terms, jnp.float32(2), blocks, parts)
        np.testing.assert_allclose(loss, 2 * 12 / 3 + 4 * (9 + 49) / 2, rtol=1e-6)
        np.testing.assert_allclose(gradient, 12 / 3 + 4 * (9 + 49) / 2, rtol=1e-6)
        assert (int(sums["labels"]), int(sums["blocks"])) == (3, 3)


@deep
@pytest.mark.parametrize("name", ["plain", "dflash2"])
def test_parts_of_a_batch_make_the_gradient_of_the_whole(name):
    """They do not share the divisors alike, of which DFlash 2 has two."""
    module, params, blocks, rest = small_step(name)
    objective = Objective(normalize="count")

    def terms(params, blocks):
        return block_loss(module, objective, 16, params, *rest, blocks)[1]

    run = jax.jit(gradients, static_argnums=(0, 3))
    whole, parts, four = (run(terms, params, blocks, n) for n in (1, 2, 4))
    for other in (parts, four):
        np.testing.assert_allclose(other[1], whole[1], rtol=1e-6)
        assert {k: float(v) for k, v in other[2].items()} == {
            k: float(v) for k, v in whole[2].items()
        }
        for a, b in zip(jax.tree.leaves(other[0]), jax.tree.leaves(whole[0])):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert norm(whole[0]) > 0.1
    first = run(terms, params, jax.tree.map(lambda x: x[:2], blocks), 1)[0]
    assert abs(norm(first) - norm(whole[0])) > 0.01


def test_remat_keeps_no_scores_for_the_backward_pass(capsys):
    module, params, blocks, rest = small_step("plain")
    scores = r"f32\[4,1,36,24\]"
    for remat in (False, True):
        again = DFlashDraftModel(module.config, remat)
        print_saved_residuals(lambda p, m=again: block_loss(m, Objective(), 16, p, *rest, blocks)[0], params)  # fmt: skip
        assert bool(re.search(scores, capsys.readouterr().out)) != remat


@deep
@pytest.mark.parametrize("name", ["plain", "dflash2"])
def test_remat_changes_no_gradient(name):
    module, params, blocks, rest = small_step(name)
    plain, again = (
        loss_and_gradients(DFlashDraftModel(module.config, remat), Objective(), 16, params, *rest, blocks)[1]
        for remat in (False, True)
    )  # fmt: skip
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@deep
@deep
def test_convolutions_of_training_blocks_do_not_mix():
    module, params, blocks, (table, _, scale) = small_step("dflash2", rows=1)
    hidden = jax.jit(functools.partial(block_hidden, module, params, table, scale))
    before = hidden(blocks)
    after = hidden(blocks.replace(tokens=blocks.tokens.at[0, 1, 0].add(1)))
    changed = jnp.abs(before - after).max(axis=(0, 1)).reshape(3, Q) > 1e-6
    assert changed.any(axis=1).tolist() == [False, True, False]


@deep
def test_a_fresh_dflash2_is_the_plain_draft():
    """Its filters pass every slot on and its selector leaves the order alone, but all of it learns."""
    module, _, blocks, rest = small_step("dflash2")
    params = random_params(module.config, jax.random.key(0))
    plain = DFlashDraftModel(dataclasses.replace(module.config, head=None))
    (loss, totals), grads = loss_and_gradients(module, Objective(), 16, params, *rest, blocks)
    (base, same), _ = loss_and_gradients(plain, Objective(), 16, params, *rest, blocks)
    np.testing.assert_allclose(totals.numerators[0] / totals.divisors[0], base, rtol=1e-5)
    np.testing.assert_array_equal(totals.correct, same.correct)
    assert float(loss) > float(base)
    selector = grads["candidate_selector"]
    assert np.asarray(selector["successor_codebook"]).any()
    assert np.asarray(grads["layers_0"]["mlp_conv"]["kernel_projection"]["weight"]).any()


def test_dominos_share_falls_from_one_to_zero():
    objective = Objective(base_steps=4)
    shares = [float(objective.base_share(jnp.int32(s))) for s in range(7)]
    assert shares == [1, 0.75, 0.5, 0.25, 0, 0, 0]
    assert float(Objective().base_share(jnp.int32(0))) == 0
