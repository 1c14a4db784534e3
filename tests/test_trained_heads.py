"""Drafts with heads in training: against their trainers' numbers, and against their own decoding."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from dflash_jax.models.draft import DFlashDraftModel, first_slot
from dflash_jax.pair import load_draft, load_target
from train.losses import Objective, acceptance_length
from train.step import block_loss, make_blocks

loss_and_gradients = jax.jit(
    jax.value_and_grad(block_loss, argnums=3, has_aux=True), static_argnums=(0, 1, 2)
)


@pytest.fixture(scope="module")
def target(golden):
    return load_target(golden / "targets/qwen3_gqa", dtype=jnp.float32)


def golden_step(golden, target, name, objective, base_share=None, **head):
    """The case, its arrays, and a step of it on its draft, whose head has the given numbers."""
    folder = golden / "training" / name
    case, arrays = json.loads((folder / "case.json").read_text()), load_file(folder / "expected.safetensors")  # fmt: skip
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
        "grad_global_norm": optax.tree.norm(grads),
    }  # fmt: skip
    return case, arrays, totals, grads, blocks, values


def close(case, run, expected, values, but=()):
    for name, value in values.items():
        if name in but or name not in expected:
            continue
        kind = "grad" if name.startswith("grad") else "loss" if name.endswith("loss") else "metrics"
        np.testing.assert_allclose(value, expected[name], **case["tolerances"][kind], err_msg=f"{run}_{name}")  # fmt: skip


@pytest.mark.parametrize("shift", [0, 1])
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
