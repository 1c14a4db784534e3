import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from train.heads import Readout
from train.losses import (
    LOSSES,
    continuation_weights,
    decay_weights,
    dpace_weights,
    kl_divergence,
    reach_weights,
)
from train.objective import Objective, Rows, acceptance_length, vocabulary_loss, weighted

D, V, A, Q = 12, 50, 4, 6
R = A * Q
NAMES = tuple(LOSSES)
SHARES = [*np.eye(len(NAMES)), np.arange(1.0, len(NAMES) + 1)]  # each alone, and all together
EVERY = tuple((name, 1.0) for name in NAMES)


def case(seed: int = 0):
    """Hidden states, head, labels, counting slots and the target's hidden states of A blocks of Q slots."""
    rng = np.random.default_rng(seed)
    hidden, teacher = (jnp.asarray(rng.standard_normal((D, R)), jnp.float32) for _ in range(2))
    head = jnp.asarray(rng.standard_normal((V, D)), jnp.float32)
    labels = jnp.asarray(rng.integers(V, size=R), jnp.int32)
    counts = jnp.asarray(rng.random((1, A, Q)) < 0.8).at[:, :, 0].set(False)
    return hidden, head, labels, counts, teacher


def mix(shares):
    """A mixture whose shares may be traced: one program for all of them."""
    return tuple(zip(NAMES, shares))


def chunked(objective, hidden, head, labels, counts, teacher, chunk):
    rows = vocabulary_loss(objective, hidden, head, labels, teacher, chunk=chunk)
    return weighted(objective, rows, jnp.ones(counts.shape[:2], jnp.int32), counts)[0]


def dense(shares, hidden, head, labels, teacher):
    """Each row's loss from the definitions, all logits at once."""
    log_p = jax.nn.log_softmax(head @ hidden, axis=0)
    log_q = jax.nn.log_softmax(head @ teacher, axis=0)
    p, q, m = jnp.exp(log_p), jnp.exp(log_q), jnp.log(0.5 * (jnp.exp(log_p) + jnp.exp(log_q)))
    kl = (q * (log_q - log_p)).sum(axis=0)
    overlap = jnp.minimum(p, q).sum(axis=0)
    lean = jnp.exp(-3 * jax.lax.stop_gradient(overlap))
    each = {
        "cross_entropy": -log_p[labels, jnp.arange(R)],
        "target_cross_entropy": -log_p[jnp.argmax(log_q, axis=0), jnp.arange(R)],
        "kl_divergence": kl,
        "reverse_kl": (p * (log_p - log_q)).sum(axis=0),
        "js_divergence": 0.5 * (q * (log_q - m) + p * (log_p - m)).sum(axis=0),
        "total_variation": 0.5 * jnp.abs(p - q).sum(axis=0),
        "negative_log_acceptance": -jnp.log(overlap),
        "lk_hybrid": lean * kl + (1 - lean) * (1 - overlap),
    }
    return sum(share * each[name] for name, share in mix(shares))


@jax.jit
@functools.partial(jax.value_and_grad, argnums=2)
def dense_loss(shares, weights, hidden, head, labels, teacher):
    return (weights.reshape(-1) * dense(shares, hidden, head, labels, teacher)).sum()


def test_the_chunked_loss_and_its_gradients_are_the_dense_ones():
    hidden, head, labels, counts, teacher = case()
    weights = counts * jnp.exp(-(jnp.arange(Q) - 1) / 4.0)[None, None]
    weights = weights / weights.sum()
    for chunk in (7, 64):

        @jax.jit
        @jax.value_and_grad
        def loss(hidden, shares, chunk=chunk):
            return chunked(Objective(mixture=mix(shares)), hidden, head, labels, counts, teacher, chunk)  # fmt: skip

        for shares in SHARES:
            value, gradient = loss(hidden, shares)
            expected = dense_loss(shares, weights, hidden, head, labels, teacher)
            np.testing.assert_allclose(value, expected[0], rtol=1e-5, err_msg=str(shares))
            np.testing.assert_allclose(gradient, expected[1], rtol=1e-5, atol=1e-6, err_msg=str(shares))  # fmt: skip


X, K = 5, 4


def corrections():
    rng = np.random.default_rng(9)
    return (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((V, X), (X, R)))


def dense_selector(logits, table, columns, labels, replace):
    """By a mask over all ids: losses among the K likeliest, whether the label is one, and the choice.

    A label that is none takes the last one's place; without `replace`, its loss is not used.
    """
    rank = jnp.argsort(jnp.argsort(-jax.lax.stop_gradient(logits), axis=0), axis=0)
    scores = logits + table @ columns
    is_label = jnp.arange(V)[:, None] == labels[None]
    listed = (is_label & (rank < K)).any(axis=0)
    chosen = jnp.argmax(jnp.where(rank < K, scores, -jnp.inf), axis=0)
    among = jnp.where(listed[None], rank < K, (rank < K - 1) | is_label)
    losses = jax.nn.logsumexp(scores, axis=0, where=among) - scores[labels, jnp.arange(R)]
    return losses, listed, chosen


@pytest.mark.parametrize(
    "mixture",
    [
        (("cross_entropy", 2.0),),
        (("cross_entropy", 0.3), ("target_cross_entropy", 0.5)),
        (("kl_divergence", 0.5), ("total_variation", 0.5), ("cross_entropy", 0.2)),
    ],
    ids=lambda m: "-".join(name for name, _ in m),
)
def test_a_frozen_heads_losses_and_gradients_are_those_of_one_that_learns(mixture):
    hidden, head, labels, _, teacher = case(3)
    objective, read = Objective(mixture=mixture), Readout(multiplier=0.7)
    weights = jnp.arange(R) * 0.1

    @functools.partial(jax.jit, static_argnums=1)
    def rows_and_gradient(hidden, learns):
        def loss(hidden):
            rows = vocabulary_loss(
                objective, hidden, head, labels, teacher, chunk=7, read=read, learns=learns
            )
            return (weights * rows.loss).sum(), rows

        return jax.grad(loss, has_aux=True)(hidden)

    frozen, learning = (jax.tree.leaves(rows_and_gradient(hidden, x)) for x in (False, True))
    for a, b in zip(frozen, learning, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert np.abs(frozen[0]).max() > 0.01


def test_a_target_that_is_no_number_is_no_other_tokens_loss():
    hidden, head, labels, _, teacher = case(4)
    objective = Objective(mixture=(("target_cross_entropy", 1.0),))
    rows = jax.jit(functools.partial(vocabulary_loss, objective, chunk=7, learns=False))(
        hidden, head, labels, teacher.at[0, 5].set(jnp.nan)
    )
    assert np.flatnonzero(np.isnan(rows.loss)).tolist() == [5]


@pytest.mark.parametrize("missing", ["skip", pytest.param("replace", marks=pytest.mark.deep)])
def test_the_chunked_selectors_loss_and_gradients_are_the_dense_ones(missing):
    hidden, head, labels, counts, _ = case()
    labels = jnp.where(jnp.arange(R) % 2 == 0, jnp.argsort(-(head @ hidden), axis=0)[1], labels).astype(jnp.int32)  # fmt: skip
    table, columns = corrections()
    objective = Objective(weights="none", selector_weight=0.7, selector_missing=missing)
    ones = jnp.ones(counts.shape[:2], jnp.int32)
    w = counts.reshape(-1)

    def ours(hidden, table, columns):
        read = Readout(table=table, columns=columns, candidates=K)
        rows = vocabulary_loss(objective, hidden, head, labels, chunk=7, read=read)
        return weighted(objective, rows, ones, counts)[0], rows

    def theirs(hidden, table, columns):
        logits = head @ hidden
        base = (w * dense(SHARES[0], hidden, head, labels, hidden)).sum() / w.sum()
        losses, listed, chosen = dense_selector(
            logits, table, columns, labels, missing == "replace"
        )
        learns = w if missing == "replace" else w & listed
        return base + 0.7 * (learns * losses).sum() / learns.sum(), (listed, chosen)

    args = hidden, table, columns
    (value, rows), gradients = jax.jit(jax.value_and_grad(ours, (0, 1, 2), has_aux=True))(*args)
    both = jax.jit(jax.value_and_grad(theirs, (0, 1, 2), has_aux=True))
    (expected, (listed, chosen)), expected_gradients = both(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert rows.listed.tolist() == listed.tolist()
    assert 0 < listed.sum() < R
    assert rows.correct.tolist() == (chosen == labels).tolist()
    for a, b in zip(gradients, expected_gradients):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_chunked_loss_with_a_correction_is_the_dense_one():
    """Domino's, whose loss without it has a share; scaled and capped before it comes in."""
    hidden, head, labels, counts, teacher = case()
    table, columns = corrections()
    objective = Objective(mixture=(("cross_entropy", 0.4), ("kl_divergence", 0.6)), weights="none")
    w, label = counts.reshape(-1), jnp.arange(R)

    def ours(hidden, table, columns):
        read = Readout(of_target=2 * head, table=table, columns=columns, multiplier=0.5, cap=2.0)
        rows = vocabulary_loss(objective, hidden, head, labels, teacher, chunk=7, read=read, base_share=0.3)  # fmt: skip
        return weighted(objective, rows, jnp.ones(counts.shape[:2], jnp.int32), counts)[0]

    def theirs(hidden, table, columns):
        base = 2 * jnp.tanh(0.5 * (head @ hidden) / 2)
        log_q = jax.nn.log_softmax(2 * head @ teacher, axis=0)

        def loss(logits):
            log_p = jax.nn.log_softmax(logits, axis=0)
            return -0.4 * log_p[labels, label] + 0.6 * (jnp.exp(log_q) * (log_q - log_p)).sum(axis=0)  # fmt: skip

        return (w * (0.7 * loss(base + table @ columns) + 0.3 * loss(base))).sum() / w.sum()

    value, gradients = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(hidden, table, columns)
    both = jax.jit(jax.value_and_grad(theirs, (0, 1, 2)))
    expected, expected_gradients = both(hidden, table, columns)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(gradients, expected_gradients):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_dpaces_weights_reach_over_chunks_and_are_constants_of_the_gradient():
    hidden, head, labels, counts, teacher = case()
    objective = Objective(weights="dpace", normalize="sequences")
    losses = jax.jit(dense)(SHARES[0], hidden, head, labels, teacher).reshape(counts.shape)
    weights = dpace_weights(jnp.exp(-losses), counts, 0.5) * counts
    expected = dense_loss(SHARES[0], weights, hidden, head, labels, teacher)
    value, gradient = jax.jit(
        jax.value_and_grad(lambda h: chunked(objective, h, head, labels, counts, None, 7))
    )(hidden)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5, atol=1e-6)


def test_the_totals_count_weights_and_correct_rows():
    hidden, head, labels, counts, _ = case()
    best = jnp.argmax(head @ hidden, axis=0).astype(jnp.int32)
    labels = jnp.where(jnp.arange(R) % 3 == 0, best, (best + 1) % V)
    objective = Objective(weights="none")

    @jax.jit
    def of(labels):
        rows = vocabulary_loss(objective, hidden, head, labels, chunk=7)
        return weighted(objective, rows, jnp.ones((1, A), jnp.int32), counts)

    loss, totals = of(labels)
    assert float(totals.weight) == counts.sum()
    assert totals.correct.tolist() == (np.arange(R) % 3 == 0).tolist()
    np.testing.assert_allclose(totals.numerators, [loss * totals.weight], rtol=1e-6)


@pytest.mark.parametrize("candidates", [pytest.param(0, marks=pytest.mark.deep), 16])
def test_the_compiled_loss_of_a_head_needs_a_quarter_of_the_dense_logits_at_most(candidates):
    vocab, width, rank, rows = 4096, 16, 8, 1024
    shapes = [(width, rows), (vocab, width), (vocab, rank), (rank, rows)]
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]

    def loss(hidden, head, table, columns):
        read = Readout(table=table, columns=columns, candidates=candidates)
        out = vocabulary_loss(
            Objective(),
            hidden,
            head,
            jnp.zeros(rows, jnp.int32),
            chunk=8,
            read=read,
            base_share=0.5,
        )
        return out.loss.sum() + (0 if out.selector is None else out.selector.sum())

    compiled = jax.jit(jax.value_and_grad(loss, (0, 2, 3))).lower(*args).compile()
    assert (
        compiled.memory_analysis().temp_size_in_bytes <= rows * vocab
    )  # a quarter of 4 bytes each


def test_the_compiled_loss_needs_a_quarter_of_the_dense_logits_at_most():
    """With every loss at once."""
    blocks, vocab, width = (2, 64, 8), 4096, 16
    rows = 1024
    shapes = [((width, rows), jnp.float32), ((vocab, width), jnp.float32), ((rows,), jnp.int32), (blocks, jnp.bool)]  # fmt: skip
    args = [jax.ShapeDtypeStruct(*s) for s in shapes]

    def temporaries(chunk):
        def loss(hidden, head, labels, counts):
            objective = Objective(mixture=EVERY, weights="dpace")
            return chunked(objective, hidden, head, labels, counts, hidden + 1, chunk)

        compiled = jax.jit(jax.value_and_grad(loss)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 4 * rows * vocab
    assert temporaries(8) <= logits / 4
    assert temporaries(rows) >= logits, "the measure does not see the logits"


def test_a_loss_of_the_targets_logits_needs_the_targets_states():
    hidden, head, labels, _, _ = case()
    for name in LOSSES.keys() - {"cross_entropy"}:
        with pytest.raises(ValueError, match=f"{name}.*target's hidden states"):
            vocabulary_loss(Objective(mixture=((name, 1.0),)), hidden, head, labels, chunk=8)


def test_an_objective_of_unknown_names_or_without_a_token_is_an_error():
    for options in ({"mixture": (("l2", 1.0),)}, {"mixture": ()}, {"weights": "x"}, {"normalize": "x"}, {"selector_missing": "x"}):  # fmt: skip
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.* must be of"):
            Objective(**options)
    kl = (("kl_divergence", 1.0),)
    with pytest.raises(ValueError, match=r"dpace.* needs one of"):
        Objective(mixture=kl, weights="dpace")
    assert Objective(mixture=kl).needs_teacher
    assert not Objective().needs_teacher


def test_kl_divergence_is_zero_for_equal_logits_and_positive_otherwise():
    _, head, labels, _, teacher = case()
    logits = head @ teacher
    np.testing.assert_allclose(kl_divergence(logits, labels, logits), 0.0, atol=1e-6)
    np.testing.assert_allclose(kl_divergence(logits, labels, logits + 3.0), 0.0, atol=1e-5)
    assert np.all(np.asarray(kl_divergence(0.5 * logits, labels, logits)) > 1e-3)


def test_kl_divergence_weighs_with_the_target_not_the_draft():
    target = jnp.log(jnp.array([[0.5], [0.5]]))
    draft = jnp.log(jnp.array([[0.9], [0.1]]))
    expected = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    np.testing.assert_allclose(kl_divergence(draft, jnp.array([0]), target), expected, rtol=1e-5)


def test_a_temperature_flattens_both_and_is_scaled_back():
    _, head, labels, _, teacher = case()
    target, draft = head @ teacher, 0.3 * head @ teacher
    expected = 4 * kl_divergence(draft / 2, labels, target / 2)
    np.testing.assert_allclose(kl_divergence(draft, labels, target, 2.0), expected, rtol=1e-6)
    assert np.all(np.abs(expected - kl_divergence(draft, labels, target)) > 1e-3)


def test_decay_weights_are_the_papers():
    weights = decay_weights(jnp.arange(16) - 1, 7.0)
    expected = {0: 0.0, 1: 1.0, 2: 0.8669, 8: 0.3679, 15: 0.1353}
    assert {k: round(float(weights[k]), 4) for k in expected} == expected
    np.testing.assert_allclose(weights[1:], np.exp(-np.arange(15) / 7.0), rtol=1e-6)
    np.testing.assert_allclose(decay_weights(jnp.arange(4) - 1, float("inf")), [0, 1, 1, 1])
    assert decay_weights(jnp.arange(99) - 98, 0.1).tolist() == [0] * 98 + [1]  # no infinity, no NaN


def rows_of(losses, confidence=1.0):
    losses = jnp.asarray(losses, jnp.float32)
    return Rows(losses, jnp.full(losses.shape, confidence), jnp.zeros(losses.shape, bool))


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [("weights", (3 + 2 * 5) / 3), ("count", (3 + 2 * 5) / 2), ("sequences", 3 + 2 * 5)],
)
def test_the_weighted_sum_is_divided_as_asked(normalize, expected):
    """Two slots count, of losses 3 and 5; a gamma of 1/log(1/2) makes their weights 1 and 2."""
    objective = Objective(gamma=1 / np.log(0.5), normalize=normalize)
    rows, counts = rows_of([7, 3, 5, 9]), jnp.array([[[False, True, True, False]]])
    loss, totals = weighted(objective, rows, jnp.ones((1, 1), jnp.int32), counts)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(totals.weight, 3, rtol=1e-6)
    nothing, _ = weighted(objective, rows, jnp.ones((1, 1), jnp.int32), jnp.zeros_like(counts))
    assert float(nothing) == 0


def test_the_decay_starts_behind_each_blocks_prefix():
    counts = jnp.array([[[False, True, True, True], [False, False, False, True]]])
    objective = Objective(gamma=1.0)
    rows = rows_of(np.arange(8.0))
    _, totals = weighted(objective, rows, jnp.array([[1, 3]]), counts)
    np.testing.assert_allclose(totals.weight, 2 + np.exp(-1) + np.exp(-2), rtol=1e-6)
    np.testing.assert_allclose(
        totals.numerators[0], 1 + 2 * np.exp(-1) + 3 * np.exp(-2) + 7, rtol=1e-6
    )


def test_the_decay_starts_at_slot_0_where_it_predicts_too():
    counts = jnp.ones((1, 1, 3), bool)
    _, totals = weighted(Objective(gamma=2.0), rows_of([1.0, 2, 4]), jnp.zeros((1, 1), jnp.int32), counts)  # fmt: skip
    w = np.exp(-np.arange(3) / 2)
    np.testing.assert_allclose(totals.weight, w.sum(), rtol=1e-6)
    np.testing.assert_allclose(totals.numerators[0], w @ [1, 2, 4], rtol=1e-6)
    length, _ = acceptance_length(counts.at[0, 0, 1].set(False), counts, jnp.array([[True]]), 0)
    assert float(length) == 2


def test_dpace_weights_are_the_gradient_of_the_expected_accepted_length():
    """By the log-probabilities, at alpha 0: the sum over k of the product of the first k."""
    q = jnp.array(np.random.default_rng(0).random((1, 2, Q)), jnp.float32)
    counts = jnp.ones(q.shape, bool).at[:, 1, 3:].set(False)

    def length(log_q):
        return (jnp.cumprod(jnp.where(counts, jnp.exp(log_q), 1), axis=2) * counts).sum()

    expected = jax.grad(length)(jnp.log(q))
    np.testing.assert_allclose(dpace_weights(q, counts, 0.0) * counts, expected, rtol=1e-5)
    assert np.allclose(dpace_weights(q, counts, 1.0)[0, 0], [6, 5, 4, 3, 2, 1])
    zero = jnp.zeros(q.shape)
    assert np.all(np.isfinite(continuation_weights(zero, counts, 0.0)))


def test_the_confidence_is_that_in_the_mixtures_tokens():
    hidden, head, labels, _, teacher = case()
    log_p = jax.nn.log_softmax(head @ hidden, axis=0)
    argmax = jnp.argmax(head @ teacher, axis=0)
    data, target = log_p[labels, jnp.arange(R)], log_p[argmax, jnp.arange(R)]

    @jax.jit
    def confidence(shares):
        objective = Objective(mixture=mix(shares))
        return vocabulary_loss(objective, hidden, head, labels, teacher, chunk=7).confidence

    for shares, expected in (
        ({"cross_entropy": 2.0}, data),
        ({"target_cross_entropy": 0.1, "total_variation": 0.9}, target),
        ({"cross_entropy": 1.5, "target_cross_entropy": 0.5}, 0.75 * data + 0.25 * target),
        ({"reverse_kl": 1.0}, 0 * data),
    ):
        got = confidence(np.array([shares.get(name, 0.0) for name in NAMES]))
        np.testing.assert_allclose(got, np.exp(expected), rtol=1e-5)


# Against speculators 0.9.0. Its rows are tokens, so everything here is the transpose of its arrays.

THEIRS = {
    "ce": "target_cross_entropy", "kl_div": "kl_divergence", "rkl": "reverse_kl", "jsd": "js_divergence",
    "tv": "total_variation", "nla": "negative_log_acceptance", "lk_hybrid": "lk_hybrid",
}  # fmt: skip
RUNS = {
    **{f"{k}_nodecay": ({k: 1.0}, "none") for k in THEIRS},
    **{f"{k}_decay": ({k: 1.0}, "decay") for k in THEIRS},
    "ce_dpace": ({"ce": 1.0}, "dpace"),
    "mix": ({"ce": 0.1, "tv": 0.9}, "decay"),
    "mix3": ({"kl_div": 0.5, "nla": 0.25, "jsd": 0.25}, "decay"),
}


@pytest.fixture(scope="module")
def speculators(golden):
    folder = golden / "training/speculators_losses"
    return json.loads((folder / "case.json").read_text()), load_file(folder / "expected.safetensors")  # fmt: skip


@functools.partial(jax.jit, static_argnames="options")
@functools.partial(jax.value_and_grad, argnums=1)
def loss_of_logits(shares, logits, targets, counts, options):
    """The head is the identity, so that the states are the logits."""
    objective = Objective(mixture=mix(shares), normalize="count", **dict(options))
    labels = jnp.zeros(logits.shape[1], jnp.int32)
    return chunked(objective, logits, jnp.eye(len(logits)), labels, counts, targets, 7)


@pytest.mark.parametrize("run", RUNS)
def test_losses_and_gradients_equal_speculators(speculators, run):
    recipe, arrays = speculators
    names, weights = RUNS[run]
    shares = np.zeros(len(NAMES))
    for name, share in names.items():
        shares[NAMES.index(THEIRS[name])] = share
    options = {"weights": weights, "gamma": recipe["gamma"], "alpha": recipe["dpace_alpha"]}
    logits, targets = (jnp.asarray(arrays[k][0].T) for k in ("logits", "targets"))
    counts = jnp.asarray(arrays["loss_mask"]).reshape(1, -1, recipe["block_size"])
    loss, gradient = loss_of_logits(shares, logits, targets, counts, tuple(options.items()))
    close = recipe["tolerances"]
    np.testing.assert_allclose(loss, arrays[f"{run}_loss"], **close["losses_and_weights"])
    np.testing.assert_allclose(gradient.T, arrays[f"{run}_grad_logits"][0], **close["grad_logits"])


@pytest.mark.parametrize("name", THEIRS)
def test_each_rows_loss_equals_speculators(speculators, name):
    recipe, arrays = speculators
    logits, targets = (jnp.asarray(arrays[k][0].T) for k in ("logits", "targets"))
    loss = LOSSES[THEIRS[name]](logits, jnp.zeros(logits.shape[1], jnp.int32), targets)
    expected = arrays[f"{name}_elementwise"][0]
    np.testing.assert_allclose(loss, expected, **recipe["tolerances"]["losses_and_weights"])


def test_weights_equal_speculators(speculators):
    recipe, arrays = speculators
    close = recipe["tolerances"]["losses_and_weights"]
    slot = jnp.asarray(arrays["pos_idx"], jnp.int32)
    gamma = recipe["gamma"]
    np.testing.assert_allclose(decay_weights(slot - 1, gamma), arrays["decay_dflash"], **close)
    np.testing.assert_allclose(decay_weights(slot, gamma), arrays["decay_sample_from_anchor"], **close)  # fmt: skip
    by_base = decay_weights(slot, -1 / np.log(0.8))
    np.testing.assert_allclose(by_base, arrays["decay_exp08"], **close)
    shape = (1, -1, recipe["block_size"])
    counts = jnp.asarray(arrays["loss_mask"]).reshape(shape)
    confidence = jnp.exp(-jnp.asarray(arrays["ce_elementwise"])).reshape(shape)
    for name, alpha in (("alpha0", 0.0), ("alpha5", 0.5), ("alpha9", 0.9)):
        weights = dpace_weights(confidence, counts, alpha) * counts
        np.testing.assert_allclose(weights.reshape(1, -1), arrays[f"dpace_weights_{name}"], **close)


# Against SpecForge 0.2.0.


@pytest.mark.parametrize(
    ("run", "function"),
    [
        ("dpace", dpace_weights),
        ("dpace_cumulative_confidence_only", reach_weights),
        ("dpace_continuation_value_only", continuation_weights),
    ],
)
def test_dpace_weights_equal_specforges(golden, run, function):
    folder = golden / "training/specforge_dflash"
    recipe = json.loads((folder / "case.json").read_text())
    arrays = load_file(folder / "expected.safetensors")
    counts = jnp.asarray(arrays[f"{run}_weight_mask"]) > 0
    confidence = jnp.asarray(arrays[f"{run}_target_probability"])
    weights = function(confidence, counts, recipe["dpace_alpha"])
    np.testing.assert_allclose(weights, arrays[f"{run}_weights"], **recipe["tolerances"]["metrics"])


# Acceptance.


@pytest.mark.parametrize(
    ("correct", "counts", "expected"),
    [
        ("0000", "0111", 1),
        ("0111", "0111", 4),
        ("1111", "0111", 4),  # slot 0 is the anchor: never judged
        ("1000", "0111", 1),
        ("0101", "0111", 2),
        ("0011", "0111", 1),
        ("0111", "0110", 3),  # a slot without a label ends the prefix
        ("0111", "0101", 2),
        ("0111", "0000", 1),
    ],
)
def test_acceptance_length_is_the_matching_prefix_and_one(correct, counts, expected):
    bits = [jnp.array([[[c == "1" for c in text]]]) for text in (correct, counts)]
    length, blocks = acceptance_length(*bits, jnp.array([[True]]))
    assert (float(length), float(blocks)) == (expected, 1)


def test_acceptance_length_leaves_unreal_blocks_out():
    correct = jnp.ones((1, 3, 4), bool)
    counts = jnp.array([[[False, True, True, True]] * 3])
    length, blocks = acceptance_length(correct, counts, jnp.array([[True, False, True]]))
    assert (float(length), float(blocks)) == (8, 2)
