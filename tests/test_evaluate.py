import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import random_params
from training import CONFIG, TAPS, tiny_answers, tiny_target

from dflash_jax.config import DraftConfig
from dflash_jax.models.draft import DFlashDraftModel
from train.anchors import sample_anchors
from train.data import make_batch, stack_features
from train.evaluate import evaluate
from train.step import block_hidden, make_blocks

TARGET = tiny_target()
DRAFT = DraftConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size=64, max_position_embeddings=128, rms_norm_eps=1e-6, rope=CONFIG.rope, qk_norm=True,
    block_size=4, mask_token_id=63, target_layer_ids=TAPS, num_target_layers=3,
)  # fmt: skip
MODULE = DFlashDraftModel(DRAFT)
PARAMS = random_params(DRAFT, 2)
WIDTH = 64
SIZE = 40


@pytest.fixture(scope="module")
def examples():
    return tiny_answers(5, 16)


def evaluated(examples, head=None, batch_size=4, anchors=6, **options):
    embedding = TARGET.params["embed_tokens"]["weight"]
    head = TARGET.params["lm_head"]["weight"] if head is None else head
    return evaluate(
        MODULE, PARAMS, embedding, head, jnp.ones(WIDTH), examples,
        anchors=anchors, batch_size=batch_size, size=SIZE, chunk=32, **options,
    )  # fmt: skip


def test_it_is_the_mean_over_blocks_of_the_matching_prefix_and_one(examples):
    rows = [[e] for e in examples[:4]]
    batch = make_batch(rows, SIZE)
    supervised = jnp.asarray(batch.supervised)
    positions, real = sample_anchors(jax.random.fold_in(jax.random.key(0), 0), supervised, 6)
    blocks = jax.jit(make_blocks, static_argnums=5)(
        batch.tokens, stack_features(rows, SIZE), supervised, positions, real, 4
    )
    embedding, head = (TARGET.params[k]["weight"] for k in ("embed_tokens", "lm_head"))
    hidden = jax.jit(block_hidden, static_argnums=0)(MODULE, PARAMS, embedding, jnp.ones(WIDTH), blocks)  # fmt: skip
    chosen = np.einsum("VD,DBT->BTV", head, hidden).argmax(axis=-1)
    chosen = chosen.reshape(4, 6, 4)
    lengths = []
    for row, e in enumerate(examples[:4]):
        for i, a in enumerate(np.asarray(positions[row]).tolist()):
            if real[row, i]:
                n = 1
                while n < 4 and a + n < len(e.tokens) and chosen[row, i, n] == e.tokens[a + n]:
                    n += 1
                lengths.append(n)
    assert evaluated(examples[:4]) == pytest.approx(np.mean(lengths), rel=1e-6)


def test_a_draft_that_says_one_token_is_judged_by_that_token(examples):
    """A head whose row 7 always wins: the acceptance length is countable by hand."""
    embedding = TARGET.params["embed_tokens"]["weight"]
    constant = [
        dataclasses.replace(e, tokens=np.where(np.arange(len(e.tokens)) < e.prompt_length, e.tokens, 7))
        for e in examples[:2]
    ]  # fmt: skip
    head = jnp.zeros_like(embedding)
    # All logits are 0, and argmax takes the first: token 0.
    zeros = [dataclasses.replace(e, tokens=np.where(e.tokens == 7, 0, e.tokens)) for e in constant]
    assert evaluated(constant, head, batch_size=2, anchors=SIZE) == 1.0
    response = len(zeros[0].tokens) - zeros[0].prompt_length
    got = evaluated(zeros[:1], head, batch_size=2, anchors=SIZE)
    blocks = [min(4, response - i) for i in range(response - 1)]
    assert got == pytest.approx(np.mean(blocks))


def test_a_last_batch_that_is_filled_up_counts_each_example_once(examples):
    """Three examples in batches of two: the third stands twice and counts once."""
    zeros = jnp.zeros_like(TARGET.params["lm_head"]["weight"])
    short, long = examples[0], examples[1]
    blank = dataclasses.replace(
        long, tokens=np.where(np.arange(len(long.tokens)) < long.prompt_length, long.tokens, 0)
    )
    other = dataclasses.replace(short, tokens=np.maximum(short.tokens, 1))
    args = dict(head=zeros, batch_size=2, anchors=SIZE)
    parts = [(evaluated([e], **args), len(e.tokens) - e.prompt_length - 1) for e in (other, other, blank)]  # fmt: skip
    expected = sum(v * n for v, n in parts) / sum(n for _, n in parts)
    assert evaluated([other, other, blank], **args) == pytest.approx(expected, rel=1e-6)


def test_it_gives_the_same_number_each_time(examples):
    assert evaluated(examples) == evaluated(examples)
