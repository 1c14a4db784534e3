"""The training forward: against NeMo's numbers, block by block, and against the decoder."""

import dataclasses
import functools
import json

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from training import taps_of, tiny_target

from dflash_jax.adapters import bind
from dflash_jax.cache import KVCache
from dflash_jax.decode import decode, prefill
from dflash_jax.models.draft import DFlashDraftModel, first_slot
from dflash_jax.models.transformer import Transformer
from dflash_jax.pair import load_draft, load_target
from dflash_jax.states import new_draft_cache, new_state
from train.anchors import sample_anchors
from train.evaluate import block_correct
from train.objective import Objective, acceptance_length
from train.step import block_hidden, block_loss, in_vocabulary, make_blocks, target_rows

CONFIG = fakes.DRAFT
MODULE = DFlashDraftModel(CONFIG)
PARAMS = fakes.random_params(CONFIG, 1)
WIDTH = len(CONFIG.target_layer_ids) * CONFIG.hidden_size
apply_blocks = jax.jit(functools.partial(MODULE.apply, method="blocks"))
hidden_of = jax.jit(block_hidden, static_argnums=0)
loss_and_gradients = jax.jit(
    jax.value_and_grad(block_loss, argnums=3, has_aux=True), static_argnums=(0, 1, 2)
)


@pytest.fixture(scope="module")
def golden_pair(golden):
    target = load_target(golden / "targets/qwen3_gqa", dtype=jnp.float32)
    return target, load_draft(golden / "drafts/dflash_full", target, dtype=jnp.float32)


def normal(seed: int, *shape: int):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


# Against NeMo Automodel's trainer.


@pytest.fixture(scope="module")
def nemo(golden):
    case = json.loads((golden / "training/nemo_dflash/case.json").read_text())
    return case, load_file(golden / "training/nemo_dflash/expected.safetensors")


def test_nemos_anchors_are_ours_without_the_partial_blocks(nemo):
    case, arrays = nemo
    supervised = jnp.asarray(arrays["loss_mask"]) > 0
    S = supervised.shape[1]
    ours, real = (np.asarray(x) for x in sample_anchors(jax.random.key(0), supervised, S))
    theirs = arrays["all_anchor_candidates"]
    kept = arrays["all_anchor_candidates_keep"]
    for row in range(2):
        own, nemos = set(ours[row][real[row]].tolist()), set(theirs[row][kept[row]].tolist())
        assert nemos
        # NeMo wants the whole block inside the row, but takes anchors that have no label behind.
        assert {a for a in own if a <= S - case["block_size"]} <= nemos
        assert nemos - own == {a for a in nemos if not supervised[row, a + 1]}


def test_visibility_equals_nemos_mask(golden):
    """A key is visible to a slot exactly if the slot's output has a gradient with respect to it."""
    case = json.loads((golden / "training/nemo_masks/case.json").read_text())
    arrays = load_file(golden / "training/nemo_masks/expected.safetensors")
    S, Q = case["context_length"], case["block_size"]
    anchors = jnp.asarray(arrays["anchors"], jnp.int32)
    A = anchors.shape[1]

    @jax.jit
    def seen(anchors):
        one = functools.partial(MODULE.apply, {"params": PARAMS}, anchors=anchors[None], method="blocks")  # fmt: skip
        # One layer deep is the mask; two layers only mix within a block.
        x, context = normal(0, CONFIG.hidden_size, 1, A * Q), normal(1, WIDTH, 1, S)
        readout = normal(2, CONFIG.hidden_size)

        def slots(x, context):
            return jnp.einsum("D,DT->T", readout, one(x, context)[:, 0])

        by_block, by_context = jax.jacrev(slots, argnums=(0, 1))(x, context)
        parts = [jnp.abs(j[:, :, 0]).max(axis=1) for j in (by_context, by_block)]
        return jnp.concatenate(parts, axis=1) > 0

    for row in range(2):
        np.testing.assert_array_equal(seen(anchors[row]), arrays["mask_full"][row])


# Visibility, stated literally.


def block_outputs(anchors, Q, seed=0, *, feature=None, embedding=None, S=12):
    """Outputs `[A, Q, D]`, with one feature or one block embedding (block, slot) changed."""
    A = len(anchors)
    x, context = normal(seed, CONFIG.hidden_size, 1, A * Q), normal(seed + 1, WIDTH, 1, S)
    if feature is not None:
        context = context.at[:, 0, feature].add(1.0)
    if embedding is not None:
        x = x.at[:, 0, embedding[0] * Q + embedding[1]].add(1.0)
    out = apply_blocks({"params": PARAMS}, x, context, jnp.array([anchors]))
    return np.asarray(out[:, 0].T.reshape(A, Q, -1))


def changed(a, b):
    return [bool(np.abs(x - y).max() > 1e-6) for x, y in zip(a, b)]


def test_overlapping_blocks_see_exactly_the_features_before_their_own_anchor():
    plain = block_outputs((4, 6), 4)
    for position in range(12):
        other = block_outputs((4, 6), 4, feature=position)
        assert changed(plain, other) == [position < 4, position < 6], position


def test_the_block_is_bidirectional_and_no_block_sees_another():
    plain = block_outputs((4, 6, 6), 4)
    for block in range(3):
        for slot in range(4):
            other = block_outputs((4, 6, 6), 4, embedding=(block, slot))
            for b in range(3):
                assert changed(plain[b], other[b]) == [b == block] * 4, (block, slot, b)


def test_a_block_is_the_same_whatever_other_blocks_and_later_features_there_are():
    x, context = normal(5, CONFIG.hidden_size, 1, 12), normal(6, WIDTH, 1, 20)
    many = apply_blocks({"params": PARAMS}, x, context, jnp.array([[3, 7, 16]]))
    for i, anchor in enumerate((3, 7, 16)):
        alone = apply_blocks(
            {"params": PARAMS}, x[:, :, 4 * i : 4 * i + 4], context[:, :, :anchor], jnp.array([[anchor]])
        )  # fmt: skip
        np.testing.assert_allclose(many[:, :, 4 * i : 4 * i + 4], alone, atol=1e-5)


# The trainer and the decoder.


def decoder_logits(target, draft, tokens, features, anchor: int, block_size: int):
    """The decoder's draft logits `[V, Q - 1]` with the context of positions 0..anchor-1."""
    models, params = bind(target, draft, block_size)
    # Rows from the anchor on are written too, and never seen.
    context = np.where(np.arange(len(features))[:, None] < anchor, features, 1e3)
    context = jnp.asarray(context.T[:, None], jnp.float32)
    anchor_token, length = (jnp.array([i], jnp.int32) for i in (tokens[anchor], anchor))
    cache = new_draft_cache(draft, 1, 64)
    return np.asarray(
        extend_and_propose(models.draft, block_size, params, context, cache, anchor_token, length)
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def extend_and_propose(fns, block_size, params, context, cache, anchor_token, length):
    cache = fns.extend(params, context, cache).replace(length=length)
    return fns.block_logits(params, anchor_token, cache, block_size)[0][:, 0]


@pytest.mark.parametrize("pair", ["golden", "random"])
def test_the_trainers_draft_logits_are_the_decoders(pair, golden_pair):
    target, draft = (fakes.random_target(), fakes.random_draft()) if pair == "random" else golden_pair  # fmt: skip
    Q, S = 6, 30
    rng = np.random.default_rng(0)
    tokens = rng.integers(target.config.vocab_size - 10, size=S)
    width = len(draft.config.target_layer_ids) * target.config.hidden_size
    features = rng.standard_normal((S, width)).astype(np.float32)
    anchors = jnp.array([[1, 2, 13, S - 2, S - 1]], jnp.int32)
    real = jnp.ones(anchors.shape, bool)
    blocks = make_blocks(
        jnp.asarray(tokens[None], jnp.int32), jnp.asarray(features[None]), jnp.ones((1, S), bool), anchors, real, Q
    )  # fmt: skip
    embedding, head = (target.params[k]["weight"] for k in ("embed_tokens", "lm_head"))
    hidden = hidden_of(
        DFlashDraftModel(draft.config), draft.params, embedding, jnp.ones(width), blocks
    )
    logits = np.asarray(head @ hidden[:, 0]).reshape(len(head), anchors.shape[1], Q)[:, :, 1:]
    assert np.abs(logits).max() > 1
    for i, anchor in enumerate(anchors[0].tolist()):
        expected = decoder_logits(target, draft, tokens, features, anchor, Q)
        np.testing.assert_allclose(logits[:, i], expected, atol=1e-5 * np.abs(expected).max())


def test_a_block_at_position_0_has_no_context_and_equals_the_decoders_empty_cache():
    target, draft = fakes.random_target(), fakes.random_draft()
    x = normal(3, CONFIG.hidden_size, 1, 4)
    in_training = apply_blocks({"params": draft.params}, x, normal(4, WIDTH, 1, 9), jnp.array([[0]]))  # fmt: skip
    cache = KVCache.zeros(CONFIG.num_hidden_layers, 1, CONFIG.num_key_value_heads, 16, CONFIG.head_dim, jnp.float32)  # fmt: skip
    in_decoding, _ = MODULE.apply({"params": draft.params}, x, cache)
    np.testing.assert_allclose(in_training, in_decoding, atol=1e-5)
    assert target.config.hidden_size == CONFIG.hidden_size


def first_round(target, draft, prompt) -> int:
    """Tokens that the generator's first round commits after prefill of `prompt`."""
    models, params = bind(target, draft)
    state = new_state(target, [prompt], [40], (), 128)
    state = state.replace(draft=new_draft_cache(draft, 1, 128))
    state = prefill(models.target, models.draft, params, state, chunk=64)
    return int(decode(models, params, state, np.int32(1)).committed[0, 0])


@pytest.mark.deep
@pytest.mark.parametrize(
    "name", ["dflash_full", "dflash_softcap", "domino", "dflash2", "speculators_reduced_vocab"]
)
def test_teacher_forced_acceptance_at_an_anchor_is_the_generators_first_round(golden, name):
    source = json.loads((golden / "drafts" / name / "case.json").read_text())["target"]
    target = load_target(golden / source, dtype=jnp.float32)
    draft = load_draft(golden / "drafts" / name, target, dtype=jnp.float32)
    c, t, Q = draft.config, target.config, draft.config.block_size
    expected = load_file(golden / source / "expected.safetensors")
    prompt = expected["p0_prompt"].tolist()
    tokens = prompt + expected["p0_greedy"].tolist()
    S, skip = len(tokens), first_slot(c)
    anchors = jnp.array([[*range(len(prompt), S - Q - 1, 3), S - Q - 1]], jnp.int32)
    cache = KVCache.zeros(t.num_hidden_layers, 1, t.num_key_value_heads, S, t.head_dim, jnp.float32)
    forward = jax.jit(Transformer(t, c.target_layer_ids).apply)
    _, context, _ = forward({"params": target.params}, jnp.array([tokens]), cache)
    supervised = (jnp.arange(S) >= len(prompt))[None]
    blocks = make_blocks(
        jnp.array([tokens]), context.transpose(1, 2, 0), supervised, anchors, jnp.ones(anchors.shape, bool), Q,
        first_slot=skip,
    )  # fmt: skip
    d2t, embedding = draft.params.get("d2t"), target.params["embed_tokens"]["weight"]
    head = embedding if t.tie_word_embeddings else target.params["lm_head"]["weight"]
    blocks = in_vocabulary(blocks, d2t)
    correct = block_correct(
        DFlashDraftModel(c), draft.params, embedding, target_rows(head, None, d2t), jnp.ones(len(context)), blocks,
        chunk=64,
    )[:, :, : c.max_proposals + skip]  # fmt: skip
    counts = blocks.counts[:, :, : c.max_proposals + skip]
    lengths = [
        int(acceptance_length(correct[:, i : i + 1], counts[:, i : i + 1], blocks.real[:, i : i + 1], skip)[0])
        for i in range(anchors.shape[1])
    ]  # fmt: skip
    assert lengths == [first_round(target, draft, tokens[:a]) for a in anchors[0].tolist()]
    assert len(set(lengths)) > 1, "every anchor accepts the same number: the test shows nothing"


def test_the_targets_probabilities_come_back_from_its_stored_states():
    """The tap on its last layer is behind the final norm, as a loss of its logits needs it."""
    target, tokens = tiny_target(), np.arange(3, 23, dtype=np.int32)
    states = taps_of(target, tokens, (target.config.num_hidden_layers - 1,))
    head = target.params["lm_head"]["weight"]
    stored = jax.nn.log_softmax(head @ states.T, axis=0)
    t = target.config
    cache = KVCache.zeros(
        t.num_hidden_layers, 1, t.num_key_value_heads, 32, t.head_dim, jnp.float32
    )
    model, params = Transformer(t), {"params": target.params}
    hidden, _, _ = jax.jit(model.apply)(params, tokens[None], cache)
    own = jax.nn.log_softmax(model.apply(params, hidden, method="logits")[:, 0], axis=0)
    assert float((jnp.exp(own) * (own - stored)).sum(axis=0).max()) < 1e-5
    assert float((jnp.exp(own) * (own - jnp.roll(stored, 1, axis=1))).sum(axis=0).max()) > 0.1


def test_a_causal_draft_trains_without_the_slots_behind():
    config = dataclasses.replace(CONFIG, num_hidden_layers=1, layer_types=(), is_causal=True)
    params = fakes.random_params(config, 1)
    run = jax.jit(functools.partial(DFlashDraftModel(config).apply, {"params": params}, method="blocks"))  # fmt: skip
    x, context = normal(0, CONFIG.hidden_size, 1, 8), normal(1, WIDTH, 1, 12)
    plain = run(x, context, jnp.array([[4, 6]]))
    other = run(x.at[:, 0, 2].add(1.0), context, jnp.array([[4, 6]]))
    seen = jnp.abs(plain - other).max(axis=(0, 1)) > 1e-6
    assert seen.tolist() == [False, False, True, True] + [False] * 4


def test_rows_without_anchors_or_shorter_than_a_block_give_no_nan():
    target, draft = fakes.random_target(), fakes.random_draft()
    S, Q = 3, 4
    head = target.params["lm_head"]["weight"]

    def step(supervised):
        anchors, real = sample_anchors(jax.random.key(0), supervised, 3)
        blocks = make_blocks(jnp.ones((2, S), jnp.int32), normal(0, 2, S, WIDTH), supervised, anchors, real, Q)  # fmt: skip
        return loss_and_gradients(
            MODULE, Objective(), 5, draft.params, head, head, jnp.ones(WIDTH), blocks
        )

    (value, totals), grads = step(jnp.zeros((2, S), bool))
    assert float(value) == float(totals.weight) == 0
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(grads))
    # One row of three tokens: anchors 0 and 1, with two labels and one. The other row has none.
    (value, totals), grads = step(jnp.array([[True] * S, [False] * S]))
    np.testing.assert_allclose(totals.weight, 2 + np.exp(-1 / 4), rtol=1e-6)
    assert float(value) > 0
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert any(np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_the_teacher_of_slot_k_is_the_targets_state_after_the_token_before_its_label():
    target, draft = fakes.random_target(), fakes.random_draft()
    S, Q = 12, 4
    tokens = jnp.asarray(np.random.default_rng(0).integers(60, size=(2, S)), jnp.int32)
    anchors = jnp.array([[2, 5], [1, 10]])
    features, hidden_states = normal(0, 2, S, WIDTH), normal(1, 2, S, CONFIG.hidden_size)
    head = target.params["lm_head"]["weight"]
    blocks = make_blocks(
        tokens, features, jnp.ones((2, S), bool), anchors, jnp.ones((2, 2), bool), Q, hidden_states
    )
    kl = Objective(mixture=(("kl_divergence", 1.0),), weights="none")
    (value, _), _ = loss_and_gradients(
        MODULE, kl, 64, draft.params, head, head, jnp.ones(WIDTH), blocks
    )
    drafted = hidden_of(MODULE, draft.params, head, jnp.ones(WIDTH), blocks)
    drafted = drafted.reshape(-1, 2, 2, Q)
    each = []
    for b in range(2):
        for i, a in enumerate(anchors[b].tolist()):
            for k in range(1, Q):
                if a + k < S:
                    log_q = jax.nn.log_softmax(head @ hidden_states[b, a + k - 1])
                    log_p = jax.nn.log_softmax(head @ drafted[:, b, i, k])
                    each.append(float(jnp.sum(jnp.exp(log_q) * (log_q - log_p))))
    assert len(each) == 10
    np.testing.assert_allclose(value, np.mean(each), rtol=1e-5)
