"""Width control: fewer slots read while few are accepted, and never another token."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import Decoder, own_script, prompts_of, random_draft, random_target, script_of
from test_compiled import check_copies

from dflash_jax import Sampling, generate
from dflash_jax.adapters import block_widths
from dflash_jax.decode import LENGTH, RUNNING, Models, choose_width, decode
from dflash_jax.states import new_draft_cache, new_state

PROMPTS = prompts_of(4, 30)
WIDTHS = (1, 2, 4, 8)
FEW = (1, 2, 4)  # each width is compiled


def state_after(committed, finish=None):
    """A state whose rows have committed these tokens in their rounds."""
    state = new_state(random_target(), [[1]] * len(committed), [9] * len(committed), (), 64)
    table = np.zeros((len(committed), 64), np.int32)
    for line, row in zip(table, committed):
        line[: len(row)] = row
    return state.replace(
        committed=jnp.asarray(table),
        rounds=jnp.asarray([len(row) for row in committed], jnp.int32),
        finish=jnp.asarray(finish or [RUNNING] * len(committed), jnp.int32),
    )


@pytest.mark.parametrize(
    ("committed", "width"),
    [
        ([[]], 8),
        ([[1, 1]], 8),  # too few rounds to judge
        ([[1, 1, 1]], 1),
        ([[8, 8, 1, 1, 1]], 1),
        ([[1, 1, 1, 1]], 2),  # is the draft still wrong?
        ([[1, 1, 1, 1, 1, 1, 1, 1]], 2),
        ([[1, 2, 1]], 4),  # two of two slots: give it more
        ([[1, 1, 3]], 4),
        ([[4, 1, 1]], 8),
        ([[8, 8, 8]], 8),
        ([[1, 1, 1], [1, 4, 1]], 8),  # the widest row decides
        ([[1, 1, 1, 1], [1, 1, 1, 1, 1]], 1),  # the row with most rounds says when to ask again
    ],
)
def test_the_width_follows_recent_acceptance(committed, width):
    assert WIDTHS[int(choose_width(state_after(committed), WIDTHS))] == width


def test_rows_that_have_ended_have_no_say():
    state = state_after([[1, 1, 1], [8, 8, 8]], [RUNNING, LENGTH])
    assert WIDTHS[int(choose_width(state, WIDTHS))] == 1


def test_rows_that_have_ended_do_not_keep_the_draft_from_being_asked():
    state = state_after([[1, 1, 1, 1], [1, 1, 1, 1, 1]], [RUNNING, LENGTH])
    assert WIDTHS[int(choose_width(state, WIDTHS))] == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verify", ["coupled", pytest.param("rejection", marks=pytest.mark.deep)])
def test_tokens_are_the_same_at_any_width(temperature, verify):
    target, draft = random_target(), random_draft()
    kind = Sampling(temperature=temperature, verify=verify)
    options = {"max_new_tokens": 50, "block_size": 4, "sampling": kind}
    wide = generate(target, draft, PROMPTS, **options)
    adapted = generate(target, draft, PROMPTS, adapt_width=True, **options)
    if verify == "coupled":
        assert adapted.tokens == wide.tokens
    assert [sum(r) for r in adapted.rounds] == [49, 49]


@pytest.mark.deep
def test_a_draft_that_is_right_for_a_while_gets_its_width_back():
    """Wrong for 20 tokens, then always right: the rounds widen, and the text stays."""
    target, draft = random_target(), random_draft()
    text = generate(target, None, PROMPTS[:1], max_new_tokens=60).tokens[0]
    wrong = [(t + 1) % 64 for t in text[:20]]
    decoder = Decoder(target, draft, 4)
    models = dataclasses.replace(decoder.models, widths=FEW)
    script = script_of([PROMPTS[0] + wrong + text[20:]])
    start = decoder.start(PROMPTS[:1], [60])
    state = decode(models, decoder.params(script), start, np.int32(1000))
    assert state.tokens[0, 4:64].tolist() == text
    rounds = state.committed[0, : int(state.rounds[0])].tolist()
    assert rounds[:20] == [1] * 20  # the token behind the wrong ones comes without the draft
    assert rounds[20:25] == [2, 4, 4, 4, 4]


def test_a_narrow_round_drafts_no_more_than_it_reads():
    decoder, asked = Decoder(random_target(), random_draft(), 4), []

    @dataclasses.dataclass(frozen=True)
    class Asked:
        own: Any

        def extend(self, *args):
            return self.own.extend(*args)

        def propose(self, params, text, cache, block_size, pick):
            asked.append(block_size)
            return self.own.propose(params, text, cache, block_size, pick)

    models = dataclasses.replace(decoder.models, widths=FEW, draft=Asked(decoder.models.draft))
    state = decoder.start(PROMPTS[:1], [9])
    jax.eval_shape(functools.partial(decode, models), decoder.params(own_script(state)), state, 1)
    assert sorted(set(asked)) == [2, 4]


@pytest.mark.deep
@pytest.mark.parametrize("rows", [1, 8])
def test_the_choice_copies_no_cache(rows):
    target, draft = random_target(), random_draft()
    decoder = Decoder(target, draft, 4)
    models = dataclasses.replace(decoder.models, widths=FEW)
    state = new_state(target, [[1]] * rows, [1] * rows, (), 256)
    state = state.replace(draft=new_draft_cache(draft, rows, 256))
    args = (decoder.params(own_script(state)), state, np.int32(1))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    check_copies(decode.lower(models, *shapes).compile(), state, kinds=2)


@pytest.mark.parametrize(
    ("block_size", "widths"), [(2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8))]
)
def test_widths_are_powers_of_two_up_to_the_block(block_size, widths):
    assert block_widths(block_size, True) == widths
    assert block_widths(block_size, False) == ()


@pytest.mark.parametrize("widths", [(4, 2, 8), (2, 4), (2, 2, 8), (0, 8)])
def test_widths_ascend_to_the_block_size(widths):
    decoder = Decoder(random_target())
    with pytest.raises(ValueError, match="must ascend from 1"):
        Models(decoder.models.target, None, 8, widths=widths)
