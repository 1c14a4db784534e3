"""Several documents in a row: what is packed, and that no anchor, block or label knows of a neighbour."""

import dataclasses
import functools
import json

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.ops.mask import block_masks, document_positions
from dflash_jax.pair import load_draft, load_target
from train.anchors import block_labels, sample_anchors
from train.data import make_batch
from train.objective import Objective, acceptance_length
from train.packing import lay_out, pack
from train.step import block_hidden, block_loss, make_blocks
from train.store import Example


def read(golden, name):
    return load_file(golden / "training" / name / "expected.safetensors")


def documents_of(arrays, name):
    return jnp.asarray(arrays[name], jnp.int32).reshape(-1, arrays[name].shape[-1])


# Rows.


@pytest.mark.parametrize(
    ("lengths", "size", "rows"),
    [
        ([3, 4, 5], 12, [[2, 1, 0]]),
        ([3, 4, 5], 8, [[2, 0], [1]]),
        ([5, 5, 5], 5, [[0], [1], [2]]),
        # 8 leaves 2, 7 leaves 3, 6 leaves 4: each of the short ones goes where it fits best.
        ([6, 7, 8, 2, 3, 4], 10, [[2, 3], [1, 4], [0, 5]]),
        ([1, 9, 1], 10, [[1, 0], [2]]),
        ([], 10, []),
    ],
)
def test_documents_go_where_they_leave_least_room(lengths, size, rows):
    assert pack(lengths, size) == rows


def test_every_document_is_in_one_row_whole():
    lengths = np.random.default_rng(0).integers(1, 33, 500).tolist()
    rows = pack(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(500))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert max(filled) <= 64
    assert sum(lengths) / (64 * len(rows)) > 0.97


@pytest.mark.parametrize("length", [0, 9])
def test_an_empty_document_and_one_longer_than_a_row_are_named(length):
    with pytest.raises(ValueError, match=rf"document 1 has {length} tokens, not 1 to size=8"):
        pack([8, length], 8)


def test_arrays_are_laid_end_to_end():
    features = lay_out([[np.ones((2, 3)), np.full((1, 3), 2.0)]], 4)
    assert features[0, :, 0].tolist() == [1, 1, 2, 0]
    with pytest.raises(ValueError, match="row 0 holds 3 tokens, more than size=2"):
        lay_out([[np.ones((2, 3)), np.full((1, 3), 2.0)]], 2)


# Positions and masks.


@pytest.mark.parametrize(
    ("name", "documents", "positions"),
    [
        ("speculators_packed", "in_document_ids", "in_position_ids"),
        ("nemo_masks", "ctx_doc_id", None),
    ],
)
def test_positions_restart_with_each_document(golden, name, documents, positions):
    arrays = read(golden, name)
    ids = documents_of(arrays, documents)
    ours = np.asarray(document_positions(ids))
    if positions is None:
        expected = [np.concatenate([np.arange(n) for n in row]) for row in arrays["seq_lens"]]
    else:
        expected = arrays[positions]
    np.testing.assert_array_equal(np.where(ids >= 0, ours, 0), expected)


def dense(documents, anchors, *layout):
    """`block_masks` as the trainers lay them out: `[A * Q, S + A * Q]`, queries first."""
    S, A = documents.shape[1], len(anchors)
    far, near = block_masks(jnp.asarray(anchors[None], jnp.int32), S, 6, *layout, documents)
    far = np.broadcast_to(far[0], (S, A, 6)).transpose(1, 2, 0).reshape(-1, S)
    return np.concatenate([far, np.kron(np.eye(A, dtype=bool), np.asarray(near).T)], axis=1)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("packed", (None, False, "nemo")),
        ("packed_causal", (None, True, "nemo")),
        ("packed_sliding", (6, False, "nemo")),
    ],
)
def test_nemos_packed_masks(golden, name, layout):
    arrays = read(golden, "nemo_masks")
    documents = documents_of(arrays, "ctx_doc_id")
    for row in range(2):
        real = np.repeat(arrays["keep"][row], 6)
        ours = dense(documents[row : row + 1], arrays["anchors"][row], *layout)
        np.testing.assert_array_equal(ours[real], arrays[f"mask_{name}"][row][real])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("full", (None, False, "speculators")),
        ("sliding_causal", (6, True, "speculators")),
        ("sliding_noncausal", (6, False, "speculators")),
        ("sliding3_causal", (3, True, "speculators")),
    ],
)
def test_speculators_packed_masks(golden, name, layout):
    """One of its anchors is padding, which sees no context."""
    arrays = read(golden, "speculators_masks")
    ours = dense(documents_of(arrays, "document_ids"), arrays["anchors"], *layout)
    np.testing.assert_array_equal(ours, arrays[f"mask_packed_{name}"])


# Anchors and labels.


def legal(supervised, documents):
    supervised = jnp.asarray(supervised) > 0
    positions, real = sample_anchors(
        jax.random.key(0), supervised, supervised.shape[1], jnp.asarray(documents, jnp.int32)
    )
    return [p[r].tolist() for p, r in zip(np.asarray(positions), np.asarray(real))]


def test_an_anchor_has_a_successor_in_its_document():
    documents = [[0] * 20 + [1] * 20, [0] * 5 + [1] + [2] * 2 + [-1] * 32]
    assert legal(np.ones((2, 40)), documents) == [[*range(19), *range(20, 39)], [0, 1, 2, 3, 6]]


def test_nemos_packed_anchors_are_ours_without_the_partial_blocks(golden):
    arrays = read(golden, "nemo_dflash")
    documents = np.repeat([[0, 1, 2, -1]], [20, 15, 18, 5], axis=1)
    (ours,) = legal(arrays["packed_loss_mask"], documents)
    whole = [a for a in ours if arrays["packed_doc_remaining"][0, a] >= 5]
    assert whole == arrays["packed_all_anchor_candidates"][0].tolist()
    assert set(ours) - set(whole) == {15, 16, 17, 18, 30, 31, 32, 33, 48, 49, 50, 51}


def test_speculators_anchors_are_ours_where_no_block_crosses(golden):
    arrays = read(golden, "speculators_masks")
    (ours,) = legal(arrays["loss_mask"], documents_of(arrays, "document_ids"))
    theirs = set(arrays["all_anchor_candidates"].tolist())
    assert theirs - set(ours) == {11, 20}, "the last tokens of documents"
    assert set(ours) - theirs == {24}, "one of the last block_size positions of the row"


def test_a_block_over_its_documents_end_keeps_the_labels_before_it():
    tokens, documents = jnp.arange(10)[None], jnp.asarray([[0] * 4 + [1] * 4 + [-1] * 2])
    anchors = jnp.asarray([[0, 2, 4, 6]])
    labels, counts = block_labels(
        tokens, jnp.ones((1, 10), bool), anchors, jnp.ones((1, 4), bool), 4, documents
    )
    assert labels[0, 1].tolist() == [2, 3, 4, 5]
    assert counts.astype(int).tolist() == [[[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 0, 0]]]


# The training forward.

WIDTH = len(fakes.DRAFT.target_layer_ids) * fakes.DRAFT.hidden_size
Q = 4
hidden_of = jax.jit(block_hidden, static_argnums=0)
loss_and_gradients = jax.jit(
    jax.value_and_grad(block_loss, argnums=3, has_aux=True), static_argnums=(0, 1, 2)
)


def both_ways(lengths=(9, 3, 7), prompts=(2, 0, 3), size=24):
    """Blocks of the same documents packed in one row and in a row each, in the same order; features."""
    rng = np.random.default_rng(0)
    documents = [
        Example.bare(f"d{n}", "chat", rng.integers(60, size=n).astype(np.int32), np.arange(n) >= p)
        for n, p in zip(lengths, prompts)
    ]
    features = [rng.standard_normal((n, WIDTH)).astype(np.float32) for n in lengths]

    def blocks(rows, values, anchors, real, packed):
        tokens, supervised, ids = (
            jnp.asarray(x) for x in (rows.tokens, rows.supervised, rows.documents)
        )
        return make_blocks(
            tokens, jnp.asarray(values), supervised, jnp.asarray(anchors, jnp.int32), jnp.asarray(real), Q,
            documents=ids if packed else None,
        )  # fmt: skip

    anchors = [[a for a in range(p, n - 1)] for p, n in zip(prompts, lengths)]
    starts = np.cumsum([0, *lengths[:-1]])
    flat = [[a + s for own, s in zip(anchors, starts) for a in own]]
    most = max(map(len, anchors))
    padded = [[*own, *[0] * (most - len(own))] for own in anchors]
    real = [[i < len(own) for i in range(most)] for own in anchors]
    together = make_batch([documents], size)
    alone = make_batch([[d] for d in documents], size)
    return (
        blocks(together, lay_out([features], size), flat, np.ones((1, len(flat[0])), bool), True),
        blocks(alone, lay_out([[f] for f in features], size), padded, real, False),
    )


def test_packed_documents_train_as_they_do_alone():
    layers = ("sliding_attention", "full_attention")
    config = dataclasses.replace(fakes.DRAFT, sliding_window=3, layer_types=layers)
    module, params = DFlashDraftModel(config), fakes.random_params(config, 1)
    head = fakes.random_target().params["lm_head"]["weight"]
    packed, alone = both_ways()
    assert packed.counts.sum() == alone.counts.sum() > 20
    run = functools.partial(loss_and_gradients, module, Objective(), 64, params, head, head, jnp.ones(WIDTH))  # fmt: skip
    (loss, totals), grads = run(packed)
    (expected, weight), expected_grads = run(alone)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(totals.weight, weight.weight, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def target(golden):
    return load_target(golden / "targets/qwen3_gqa", dtype=jnp.float32)


def test_the_loss_and_gradients_of_nemos_packed_row(golden, target):
    arrays = read(golden, "nemo_dflash")
    case = json.loads((golden / "training/nemo_dflash/case.json").read_text())
    draft = load_draft(golden / case["draft"], target, dtype=jnp.float32)
    tokens, features, supervised, anchors, keep = (
        jnp.asarray(arrays[f"packed_{k}"])
        for k in ("input_ids", "features", "loss_mask", "anchors", "keep")
    )
    documents = jnp.asarray(np.repeat([[0, 1, 2, -1]], [20, 15, 18, 5], axis=1), jnp.int32)
    blocks = make_blocks(
        tokens.astype(jnp.int32), features, supervised > 0, anchors.astype(jnp.int32), keep, 6, documents=documents
    )  # fmt: skip
    embedding, head = (target.params[k]["weight"] for k in ("embed_tokens", "lm_head"))
    (loss, totals), grads = loss_and_gradients(
        DFlashDraftModel(draft.config), Objective(gamma=4.0), 64, draft.params, embedding, head,
        jnp.ones(features.shape[2]), blocks,
    )  # fmt: skip
    q0 = grads["layers_0"]["self_attn"]["q_proj"]["weight"]
    correct = totals.correct.reshape(blocks.counts.shape)
    length, count = acceptance_length(correct, blocks.counts, blocks.real)
    for name, value, kind in [
        ("loss", loss, "loss"),
        ("loss_weight", totals.weight, "metrics"),
        ("correct_tokens", (correct & blocks.counts).sum(), "metrics"),
        ("valid_tokens", blocks.counts.sum(), "metrics"),
        ("valid_blocks", count, "metrics"),
        ("accept_len_sum", length, "metrics"),
        ("grad_global_norm", optax.tree.norm(grads), "grad"),
        ("grad_fc", grads["fc"]["weight"], "grad"),
        ("grad_q0", q0, "grad"),
    ]:
        np.testing.assert_allclose(value, arrays[f"packed_{name}"], **case["tolerances"][kind], err_msg=name)  # fmt: skip


def test_the_states_and_labels_of_speculators_packed_row(golden, target):
    arrays = read(golden, "speculators_packed")
    draft = load_draft(golden / "drafts/speculators_full", target, dtype=jnp.float32)
    documents = documents_of(arrays, "in_document_ids")
    anchors = jnp.asarray(arrays["anchors"][None], jnp.int32)
    features = jnp.asarray(arrays["in_hidden_states"])
    blocks = make_blocks(
        jnp.asarray(arrays["in_input_ids"], jnp.int32), features, jnp.asarray(arrays["in_loss_mask"]), anchors,
        jnp.asarray(arrays["anchor_valid"][None]), 6, documents=documents,
    )  # fmt: skip
    embedding = target.params["embed_tokens"]["weight"]
    hidden = hidden_of(
        DFlashDraftModel(draft.config), draft.params, embedding, jnp.ones(features.shape[2]), blocks
    )
    np.testing.assert_array_equal(blocks.counts.reshape(-1), arrays["aligned_loss_mask"])
    np.testing.assert_allclose(hidden[:, 0].T, arrays["hidden"], rtol=2e-4, atol=3e-4)
