import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.losses import acceptance_length, decay_weights, kl_divergence, vocabulary_loss

D, V, R = 12, 50, 23
MIXTURES = [
    (("cross_entropy", 1.0),),
    (("kl_divergence", 1.0),),
    (("cross_entropy", 0.3), ("kl_divergence", 0.7)),
]


def case(seed: int = 0):
    rng = np.random.default_rng(seed)
    hidden, teacher = (jnp.asarray(rng.standard_normal((D, R)), jnp.float32) for _ in range(2))
    head = jnp.asarray(rng.standard_normal((V, D)), jnp.float32)
    labels = jnp.asarray(rng.integers(V, size=R), jnp.int32)
    weights = jnp.asarray(rng.random(R) * (rng.random(R) < 0.8), jnp.float32)
    return hidden, head, labels, weights, teacher


def dense(mixture, hidden, head, labels, weights, teacher):
    """The same loss from its definition, all logits at once."""
    log_p = jax.nn.log_softmax(head @ hidden, axis=0)
    log_q = jax.nn.log_softmax(head @ teacher, axis=0)
    each = {
        "cross_entropy": -log_p[labels, jnp.arange(R)],
        "kl_divergence": (jnp.exp(log_q) * (log_q - log_p)).sum(axis=0),
    }
    return sum(share * (weights * each[name]).sum() for name, share in mixture)


@pytest.mark.parametrize("chunk", [1, 7, R, 64])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_chunked_loss_and_its_gradients_are_the_dense_ones(mixture, chunk):
    hidden, head, labels, weights, teacher = case()

    def chunked(h):
        return vocabulary_loss(mixture, h, head, labels, weights, teacher, chunk=chunk).loss

    value, gradient = jax.value_and_grad(chunked)(hidden)
    expected, expected_gradient = jax.value_and_grad(
        lambda h: dense(mixture, h, head, labels, weights, teacher)
    )(hidden)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_the_totals_count_weights_and_correct_rows():
    hidden, head, labels, weights, _ = case()
    best = jnp.argmax(head @ hidden, axis=0).astype(jnp.int32)
    labels = jnp.where(jnp.arange(R) % 3 == 0, best, (best + 1) % V)
    totals = vocabulary_loss(MIXTURES[0], hidden, head, labels, weights, chunk=7)
    np.testing.assert_allclose(totals.weight, weights.sum(), rtol=1e-6)
    assert totals.correct.tolist() == (np.arange(R) % 3 == 0).tolist()


def test_the_compiled_loss_needs_a_quarter_of_the_dense_logits_at_most():
    rows, vocab, width = 1024, 4096, 16
    shapes = [((width, rows), jnp.float32), ((vocab, width), jnp.float32), ((rows,), jnp.int32), ((rows,), jnp.float32)]  # fmt: skip
    args = [jax.ShapeDtypeStruct(*s) for s in shapes]

    def temporaries(chunk):
        def loss(hidden, head, labels, weights):
            mixture = (("cross_entropy", 0.5), ("kl_divergence", 0.5))
            return vocabulary_loss(mixture, hidden, head, labels, weights, hidden, chunk=chunk).loss

        compiled = jax.jit(jax.value_and_grad(loss)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 4 * rows * vocab
    assert temporaries(32) <= logits / 4
    assert temporaries(rows) >= logits, "the measure does not see the logits"


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


def test_decay_weights_are_the_papers():
    weights = decay_weights(16, 7.0)
    expected = {0: 0.0, 1: 1.0, 2: 0.8669, 8: 0.3679, 15: 0.1353}
    assert {k: round(float(weights[k]), 4) for k in expected} == expected
    np.testing.assert_allclose(weights[1:], np.exp(-np.arange(15) / 7.0), rtol=1e-6)


def test_without_decay_every_slot_but_the_anchors_weighs_one():
    assert decay_weights(4, None).tolist() == [0, 1, 1, 1]
    np.testing.assert_allclose(decay_weights(4, float("inf")), [0, 1, 1, 1])


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
