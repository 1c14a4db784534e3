"""Sliding and causal layers and a reduced vocabulary in training, against NeMo Automodel and speculators."""

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
from train.objective import Objective, acceptance_length
from train.step import block_loss, in_vocabulary, make_blocks, target_rows, whole

NAMES = ("target_cross_entropy", "kl_divergence", "total_variation")
RUNS = {"ce_decay": (1.0, 0.0, 0.0), "kl_decay": (0.0, 1.0, 0.0), "mix": (0.1, 0.0, 0.9), "ce_dpace": (1.0, 0.0, 0.0)}  # fmt: skip
DRAFTS = ("speculators_reduced_vocab", "speculators_sliding_causal", "speculators_sliding_noncausal")  # fmt: skip


def read(folder):
    return json.loads((folder / "case.json").read_text()), load_file(folder / "expected.safetensors")  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1))
def loss_and_gradients(module, options, shares, params, d2t, *rest):
    """Of a mixture whose shares are traced."""
    objective = Objective(mixture=tuple(zip(NAMES, shares)), **dict(options))

    def loss(params):
        return block_loss(module, objective, 64, whole(params, d2t), *rest)

    return jax.value_and_grad(loss, has_aux=True)(params)


def speculators_blocks(arrays, i, target, size=64):
    """Their row as one of ours, padded behind to one size for all cases."""
    prenorm = arrays[f"in{i}_verifier_last_prenorm"]
    rms = np.sqrt((prenorm**2).mean(axis=-1, keepdims=True) + target.config.rms_norm_eps)
    teacher = prenorm / rms * np.asarray(target.params["norm"]["weight"])

    def row(x):
        return jnp.asarray(np.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1)))[None]

    tokens, features, supervised = (row(arrays[f"in{i}_{k}"]) for k in ("input_ids", "features", "loss_mask"))  # fmt: skip
    anchors, real = (jnp.asarray(arrays[f"in{i}_{k}"])[None] for k in ("anchors", "anchor_valid"))
    return make_blocks(
        tokens.astype(jnp.int32), features, supervised, anchors.astype(jnp.int32), real, 6, row(teacher)
    )  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("runs", [("ce_decay", "kl_decay", "mix"), ("ce_dpace",)], ids="-".join)
@pytest.mark.parametrize("name", DRAFTS)
def test_losses_and_gradients_are_speculators(golden, name, runs):
    """Its teacher's logits are restricted to the draft's vocabulary, and labels outside it are no matter."""
    case, arrays = read(golden / "drafts" / name)
    target = load_target(golden / case["target"], dtype=jnp.float32)
    draft = load_draft(golden / "drafts" / name, target, dtype=jnp.float32)
    params = dict(draft.params)
    d2t = params.pop("d2t", None)
    embedding = target.params["embed_tokens"]["weight"]
    head = embedding if target.config.tie_word_embeddings else target.params["lm_head"]["weight"]
    rows = target_rows(head, None, d2t)
    module = DFlashDraftModel(draft.config)
    for i in range(2):
        blocks = speculators_blocks(arrays, i, target)
        blocks = in_vocabulary(blocks, d2t)
        np.testing.assert_array_equal(blocks.counts.reshape(-1), arrays[f"in{i}_aligned_loss_mask"])
        assert (blocks.inside is None) == (d2t is None)
        for run in runs:
            options = {
                "gamma": 4.0,
                "normalize": "count",
                "weights": run.split("_")[-1].replace("mix", "decay"),
            }
            shares = jnp.asarray(RUNS[run])
            (loss, _), grads = loss_and_gradients(
                module, tuple(options.items()), shares, params, d2t, embedding, rows,
                jnp.ones(blocks.features.shape[2]), blocks,
            )  # fmt: skip
            values = {"loss": loss, "grad_q0": grads["layers_0"]["self_attn"]["q_proj"]["weight"], "grad_fc": grads["fc"]["weight"]}  # fmt: skip
            for key, value in values.items():
                expected = arrays.get(f"in{i}_{run}_{key}")
                if expected is not None:
                    kind = "loss" if key == "loss" else "grad"
                    np.testing.assert_allclose(value, expected, **case["tolerances"][kind], err_msg=f"in{i} {run} {key}")  # fmt: skip


@pytest.mark.deep
def test_a_sliding_draft_trains_as_nemos(golden):
    case, arrays = read(golden / "training/nemo_dflash")
    target = load_target(golden / case["target"], dtype=jnp.float32)
    draft = load_draft(golden / case["sliding_draft"], target, window_rule="nemo", dtype=jnp.float32)  # fmt: skip
    assert draft.config.sliding_window == case["sliding_window"]
    tokens, features, supervised, anchors, real = (
        jnp.asarray(arrays[k])
        for k in ("input_ids", "sliding_features", "loss_mask", "anchors", "keep")
    )
    blocks = make_blocks(tokens.astype(jnp.int32), features, supervised > 0, anchors.astype(jnp.int32), real, 6)  # fmt: skip
    embedding, head = (target.params[k]["weight"] for k in ("embed_tokens", "lm_head"))
    run = jax.jit(jax.value_and_grad(block_loss, argnums=3, has_aux=True), static_argnums=(0, 1, 2))
    (loss, totals), grads = run(
        DFlashDraftModel(draft.config), Objective(gamma=4.0), 64, draft.params, embedding, head,
        jnp.ones(features.shape[2]), blocks,
    )  # fmt: skip
    q0 = grads["layers_0"]["self_attn"]["q_proj"]["weight"]
    correct = totals.correct.reshape(blocks.counts.shape) & blocks.counts
    length, count = acceptance_length(correct, blocks.counts, blocks.real)
    for key, value, kind in [
        ("loss", loss, "loss"), ("loss_weight", totals.weight, "metrics"), ("correct_tokens", correct.sum(), "metrics"),
        ("accept_len", length / count, "metrics"), ("grad_global_norm", optax.tree.norm(grads), "grad"),
        ("grad_fc", grads["fc"]["weight"], "grad"), ("grad_q0", q0, "grad"),
    ]:  # fmt: skip
        np.testing.assert_allclose(value, arrays[f"sliding_{key}"], **case["tolerances"][kind], err_msg=key)  # fmt: skip
