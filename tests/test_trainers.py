"""Losses and gradients of whole training steps against NeMo Automodel, SpecForge and speculators."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.pair import load_draft, load_target
from train.anchors import sample_anchors
from train.objective import Objective, acceptance_length, weighted
from train.step import block_hidden, block_rows, make_blocks

TARGET_CE, KL = (("target_cross_entropy", 1.0),), (("kl_divergence", 1.0),)
pytestmark = pytest.mark.slow
MIX = (("target_cross_entropy", 0.1), ("total_variation", 0.9))
SPECFORGE = {"gamma": 4.0, "alpha": 0.5, "normalize": "sequences"}
SPECULATORS = {"gamma": 4.0, "alpha": 0.5, "normalize": "count"}
OBJECTIVES = {
    ("nemo_dflash", "gamma"): Objective(gamma=4.0),
    ("nemo_dflash", "nogamma"): Objective(weights="none"),
    ("nemo_variable_prefix", "gamma"): Objective(gamma=4.0),
    ("nemo_variable_prefix", "nogamma"): Objective(weights="none"),
    ("nemo_jetspec", "t1"): Objective(mixture=KL, weights="none", normalize="count"),
    ("nemo_jetspec", "t2"): Objective(mixture=KL, weights="none", temperature=2.0),
    ("specforge_dflash", "dflash"): Objective(gamma=4.0),
    ("specforge_dflash", "dpace"): Objective(weights="dpace", **SPECFORGE),
    ("specforge_dflash", "dpace_cumulative_confidence_only"): Objective(weights="dpace_reach", **SPECFORGE),
    ("specforge_dflash", "dpace_continuation_value_only"): Objective(weights="dpace_continuation", **SPECFORGE),
    ("speculators_packed", "ce_decay"): Objective(mixture=TARGET_CE, **SPECULATORS),
    ("speculators_packed", "kl_decay"): Objective(mixture=KL, **SPECULATORS),
    ("speculators_packed", "ce_dpace"): Objective(mixture=TARGET_CE, weights="dpace", **SPECULATORS),
    ("speculators_packed", "mix"): Objective(mixture=MIX, **SPECULATORS),
}  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def hidden_and_gradients(module, params, embedding, blocks, cotangent):
    """The draft's states, and the parameters' gradients for a gradient of the states."""
    scale = jnp.ones(blocks.features.shape[2])
    hidden, pull = jax.vjp(lambda p: block_hidden(module, p, embedding, scale, blocks), params)
    return hidden, pull(cotangent)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def loss_of_hidden(module, objective, hidden, params, embedding, head, blocks):
    """The loss with its parts, and its gradient by the states."""

    def loss(hidden):
        rows = block_rows(module, objective, 7, params, hidden, embedding, head, blocks)
        return weighted(objective, rows, blocks.first, blocks.counts)

    return jax.value_and_grad(loss, has_aux=True)(hidden)


norm = jax.jit(optax.tree.norm)


@pytest.fixture(scope="module")
def target(golden):
    return load_target(golden / "targets/qwen3_gqa", dtype=jnp.float32)


@functools.cache
def read(folder):
    return json.loads((folder / "case.json").read_text()), load_file(folder / "expected.safetensors")  # fmt: skip


def rows_of(arrays, target):
    """tokens, features, supervised, anchors, real, and the target's normed states if the case has any."""
    names = ("input_ids", "features", "loss_mask", "anchors", "keep")
    tokens, features, supervised, anchors, real = (jnp.asarray(arrays[k]) for k in names)
    teacher = None
    if "target_logits" in arrays:  # states that give them
        head = np.asarray(target.params["lm_head"]["weight"], np.float64)
        logits = arrays["target_logits"].astype(np.float64).reshape(-1, len(head)).T
        teacher = np.linalg.lstsq(head, logits)[0].T.reshape(*tokens.shape, -1)
        teacher = jnp.asarray(teacher, jnp.float32)
    return tokens.astype(jnp.int32), features, supervised > 0, anchors.astype(jnp.int32), real, teacher  # fmt: skip


def unpacked(arrays, target):
    """speculators' packed row as three rows of a document each, positions from 0."""
    documents = arrays["in_document_ids"][0]
    hidden = arrays["in_verifier_last_hidden_states"]
    rms = np.sqrt((hidden**2).mean(axis=2, keepdims=True) + target.config.rms_norm_eps)
    teacher = hidden / rms * np.asarray(target.params["norm"]["weight"])
    packed = [*(arrays[f"in_{k}"] for k in ("input_ids", "hidden_states", "loss_mask")), teacher]
    size = max((documents == d).sum() for d in range(3))

    def rows(x):
        each = [x[0][documents == d] for d in range(3)]
        return np.stack([np.pad(r, [(0, size - len(r))] + [(0, 0)] * (r.ndim - 1)) for r in each])

    tokens, features, supervised, teacher = (jnp.asarray(rows(x)) for x in packed)
    anchors = (arrays["anchors"] - np.searchsorted(documents[:53], documents[arrays["anchors"]])).reshape(3, 2)  # fmt: skip
    real = jnp.asarray(arrays["anchor_valid"]).reshape(3, 2)
    return tokens.astype(jnp.int32), features, supervised, jnp.asarray(anchors, jnp.int32), real, teacher  # fmt: skip


def blocks_of(arrays, target, block_size):
    rows = unpacked if "in_document_ids" in arrays else rows_of
    *rows, teacher = rows(arrays, target)
    first = jnp.asarray(arrays["prefix_lengths"], jnp.int32) if "prefix_lengths" in arrays else None
    return make_blocks(*rows, block_size, teacher, first)


@pytest.fixture(scope="module", params=OBJECTIVES, ids="-".join)
def run(request, golden, target):
    """The case, what is expected of the run, the run by this trainer, and its blocks."""
    name, key = request.param
    case, arrays = read(golden / "training" / name)
    expected = {k.removeprefix(f"{key}_"): v for k, v in arrays.items() if k.startswith(f"{key}_")}
    draft = load_draft(golden / case["draft"], target, dtype=jnp.float32)
    blocks = blocks_of(arrays, target, case["block_size"])
    embedding, head = (target.params[k]["weight"] for k in ("embed_tokens", "lm_head"))
    module = DFlashDraftModel(draft.config)
    forward = functools.partial(
        hidden_and_gradients, module, draft.params, embedding, blocks.replace(teacher=None)
    )  # fmt: skip
    B, A, Q = blocks.counts.shape
    hidden, _ = forward(jnp.zeros((draft.config.hidden_size, B, A * Q)))
    (loss, totals), by_hidden = loss_of_hidden(
        module, OBJECTIVES[request.param], hidden, draft.params, embedding, head, blocks
    )
    return case, expected, loss, totals, forward(by_hidden)[1], blocks


def close(run, kind, **values):
    case, expected, *_ = run
    for name, value in values.items():
        if name in expected:
            np.testing.assert_allclose(value, expected[name], **case["tolerances"][kind], err_msg=name)  # fmt: skip


def test_the_loss_and_what_divides_it_equal_theirs(run):
    _, expected, loss, totals, _, _ = run
    assert "loss" in expected
    close(run, "loss", loss=loss)
    close(run, "metrics", loss_weight=totals.weight)


def test_gradients_equal_theirs(run):
    _, expected, _, _, grads, _ = run
    assert "grad_q0" in expected
    q0 = grads["layers_0"]["self_attn"]["q_proj"]["weight"]
    close(run, "grad", grad_q0=q0, grad_fc=grads["fc"]["weight"], grad_global_norm=norm(grads))  # fmt: skip


def test_correct_tokens_equal_theirs(run):
    _, _, _, totals, _, blocks = run
    valid = blocks.counts.sum()
    correct = (totals.correct.reshape(blocks.counts.shape) & blocks.counts).sum()
    close(run, "metrics", correct_tokens=correct, valid_tokens=valid, accuracy=correct / valid)


def test_acceptance_lengths_equal_nemos(run):
    """Which count from the visible prefix on, and only blocks with something to predict."""
    _, _, _, totals, _, blocks = run
    seen = jnp.arange(blocks.counts.shape[2])[None, None] < blocks.first[:, :, None]
    correct = totals.correct.reshape(seen.shape)
    real = blocks.real & blocks.counts.any(axis=2)
    length, count = acceptance_length(correct | seen, blocks.counts | seen, real)
    length = length - jnp.where(real, blocks.first - 1, 0).sum()
    close(run, "metrics", accept_len_sum=length, valid_blocks=count, accept_len=length / count)


def test_a_visible_prefix_fills_the_block_as_nemos(golden, target):
    case, arrays = read(golden / "training/nemo_variable_prefix")
    blocks = blocks_of(arrays, target, case["block_size"])
    seen = jnp.arange(case["block_size"])[None, None] < blocks.first[:, :, None]
    ids = jnp.where(seen, blocks.tokens, case["mask_token_id"]).reshape(2, -1)
    real = np.repeat(arrays["keep"], case["block_size"], axis=1)
    np.testing.assert_array_equal(ids[real], arrays["noise_ids"][real])


def test_no_slot_of_a_block_counts_past_its_document(golden, target):
    """Nor does it in speculators' row, but only since the next documents' prompts are not supervised."""
    _, arrays = read(golden / "training/speculators_packed")
    counts = blocks_of(arrays, target, 6).counts
    np.testing.assert_array_equal(counts.reshape(-1), arrays["aligned_loss_mask"])
    answered = arrays | {"in_loss_mask": np.ones_like(arrays["in_loss_mask"])}
    past = blocks_of(answered, target, 6).counts
    assert past[0, 1].tolist() == past[1, 1].tolist() == [False, True, False, False, False, False]


def test_specforges_anchors_are_ours(golden):
    _, arrays = read(golden / "training/specforge_dflash")
    supervised = jnp.asarray(arrays["loss_mask"]) > 0
    ours, real = sample_anchors(jax.random.key(0), supervised, supervised.shape[1])
    for row in range(2):
        theirs = arrays["all_anchor_candidates"][row][arrays["all_anchor_candidates_keep"][row]]
        np.testing.assert_array_equal(ours[row][real[row]], theirs)
