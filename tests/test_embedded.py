"""The embedded pair, for real: SmolLM2-135M-Instruct and the draft that the package ships."""

import numpy as np
import pytest

from dflash_jax import bench, encode, generate, load_draft, load_target, load_tokenizer
from dflash_jax.pair import EMBEDDED_DRAFT

TOKENS = 32


@pytest.fixture(scope="module")
def outputs():
    """A short, a long and a code prompt, decoded with the draft and without, one batch each."""
    target = load_target()
    draft = load_draft(None, target)
    tokenizer = load_tokenizer(target)
    held_out = bench.read_prompts("held_out")
    prompts = [encode(tokenizer, text) for text in ("Hi", held_out[0], held_out[-1])]
    both = [generate(target, d, prompts, max_new_tokens=TOKENS) for d in (draft, None)]
    return tokenizer, *both


def test_the_draft_changes_nothing_but_the_number_of_passes(outputs):
    _, drafted, plain = outputs
    assert drafted.tokens == plain.tokens
    assert drafted.finish == plain.finish
    assert sum(map(len, drafted.rounds)) < sum(map(len, plain.rounds))


def test_the_draft_is_worth_its_cost(outputs):
    _, drafted, plain = outputs
    assert plain.acceptance_length == 1
    assert drafted.acceptance_length > 1.3


def test_the_target_speaks_english(outputs):
    tokenizer, drafted, _ = outputs
    text = tokenizer.decode(drafted.tokens[0])
    assert np.mean([c.isascii() and (c.isalpha() or c.isspace()) for c in text]) > 0.8


def test_the_shipped_draft_is_small_and_has_its_card():
    assert sum(f.stat().st_size for f in EMBEDDED_DRAFT.rglob("*") if f.is_file()) < 40e6
    card = (EMBEDDED_DRAFT / "README.md").read_text()
    for word in ("Licence", "seed", "acceptance", "recipe", "smollm2.toml"):
        assert word.lower() in card.lower(), word
