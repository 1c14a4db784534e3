import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from fakes import DRAFT, TARGET, VOCAB, prompts_of, random_draft, random_params, random_target

from dflash_jax import Generation, generate
from dflash_jax.adapters import bind
from dflash_jax.jobs import make_job
from dflash_jax.pair import Target
from dflash_jax.sampling import Sampling
from dflash_jax.states import MIN_CAPACITY, capacity

PROMPTS = prompts_of(3, 50, 8)
BLOCK = 4


@functools.cache
def target():
    return random_target()


@functools.cache
def draft():
    return random_draft()


@functools.cache
def plain():
    return generate(target(), None, PROMPTS, max_new_tokens=40, stop_token_ids=())


def test_a_draft_changes_the_rounds_and_not_the_tokens():
    out = generate(
        target(), draft(), PROMPTS, max_new_tokens=40, stop_token_ids=(), block_size=BLOCK
    )
    assert out.tokens == plain().tokens
    assert out.finish == plain().finish == ["length"] * 3
    assert [sum(r) for r in out.rounds] == [39] * 3
    assert plain().rounds == [[1] * 39] * 3
    assert plain().acceptance_length == 1.0
    assert out.acceptance_length == pytest.approx(np.mean(np.concatenate(out.rounds)))


def test_prompts_may_be_an_array():
    array = np.array(prompts_of(8, 8, 8))
    lists = generate(target(), None, array.tolist(), max_new_tokens=6)
    assert generate(target(), None, array, max_new_tokens=6).tokens == lists.tokens


def test_results_are_plain_lists_of_ints():
    out = generate(target(), None, PROMPTS, max_new_tokens=3)
    assert isinstance(out, Generation)
    assert {type(t) for row in (*out.tokens, *out.rounds) for t in row} == {int}


@pytest.mark.parametrize("new", [0, 1, 2])
def test_few_new_tokens_are_exact(new):
    out = generate(
        target(), draft(), PROMPTS, max_new_tokens=new, stop_token_ids=(), block_size=BLOCK
    )
    assert out.tokens == [row[:new] for row in plain().tokens]
    assert out.finish == ["length"] * 3
    if new < 2:
        assert out.rounds == [[], [], []]
        assert math.isnan(out.acceptance_length)


def test_the_targets_own_stop_ids_are_the_default_and_may_be_replaced():
    k = 4
    stop = plain().tokens[0][k]
    first = plain().tokens[0].index(stop)
    stopping = Target(TARGET, target().params, (stop,), target().source)
    options = {"max_new_tokens": 40, "block_size": BLOCK}
    out = generate(stopping, draft(), PROMPTS, **options)
    assert out.tokens[0] == plain().tokens[0][: first + 1]
    assert out.finish[0] == "stop"
    assert (
        generate(stopping, draft(), PROMPTS, stop_token_ids=(), **options).tokens == plain().tokens
    )


def test_many_stop_ids_are_allowed():
    missing = sorted(set(range(VOCAB)) - {t for row in plain().tokens for t in row})
    assert len(missing) > 8
    out = generate(target(), None, PROMPTS, max_new_tokens=40, stop_token_ids=missing)
    assert out.tokens == plain().tokens


def test_generation_ends_at_the_targets_last_position():
    config = TARGET.__class__(**{**vars(TARGET), "max_position_embeddings": 60})
    short = Target(config, target().params, (), target().source)
    out = generate(short, None, PROMPTS, max_new_tokens=40)
    assert [len(t) for t in out.tokens] == [40, 10, 40]
    assert out.tokens[1] == plain().tokens[1][:10]
    assert out.finish == ["length"] * 3


@pytest.mark.deep
def test_growing_past_a_bucket_changes_no_token():
    prompt = prompts_of(180)
    whole = generate(target(), draft(), prompt, max_new_tokens=120, block_size=BLOCK)
    start = generate(target(), draft(), prompt, max_new_tokens=60, block_size=BLOCK)
    assert len(whole.tokens[0]) == 120
    assert whole.tokens[0][:60] == start.tokens[0]
    rest = generate(target(), None, [prompt[0] + start.tokens[0]], max_new_tokens=60)
    assert whole.tokens[0][60:] == rest.tokens[0]


@pytest.mark.parametrize(
    ("tokens", "slots"), [(1, 256), (256, 256), (257, 512), (512, 512), (513, 1024)]
)
def test_capacities_are_powers_of_two(tokens, slots):
    assert capacity(tokens) == slots >= MIN_CAPACITY


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts is empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, VOCAB]], {}, f"prompt 0 holds id {VOCAB}"),
        ([[-1]], {}, "prompt 0 holds id -1"),
        ([[1] * 513], {}, "prompt 0 has 513 tokens; the target has 512"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens=-1"),
        ([[1]], {"stop_token_ids": (VOCAB,)}, f"stop_token_ids holds {VOCAB}"),
        ([[1]], {"block_size": 0}, r"block_size=0 must be in \[1, 16\]"),
        ([[1]], {"block_size": 17}, r"block_size=17 must be in \[1, 16\]"),
    ],
)
def test_mistakes_raise_before_anything_runs(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(target(), draft(), prompts, **{"max_new_tokens": 4, **options})


@pytest.mark.parametrize("prompt", ["text", [1.5], {"image": 1}])
def test_prompts_that_are_not_token_ids_are_refused_by_number(prompt):
    with pytest.raises(ValueError, match="prompt 1 must be a list of token ids, not "):
        make_job(target(), None, [[1], prompt], 4, (), Sampling(), None)


@pytest.mark.parametrize(
    "option", ["logits_processor", "grammar", "images", "repetition_penalty", "top_k"]
)
def test_settings_that_decoding_does_not_have_are_refused_by_name(option):
    with pytest.raises(TypeError, match=option):
        generate(target(), None, [[1]], max_new_tokens=4, **{option: object()})


def test_plain_decoding_has_no_blocks():
    with pytest.raises(ValueError, match=r"block_size=2 must be in \[1, 1\], without a draft"):
        generate(target(), None, [[1]], max_new_tokens=4, block_size=2)
    assert bind(target(), None, 1)[0].block_size == 1
    assert bind(target(), draft(), 1)[0].draft is None, "a block of one drafts nothing"
    assert bind(target(), draft())[0].block_size == DRAFT.block_size


def test_a_broken_target_is_an_error_and_not_token_0():
    params = random_params(TARGET, 0)
    params["norm"]["weight"] = params["norm"]["weight"] * jnp.nan
    broken = Target(TARGET, params, (), target().source)
    with pytest.raises(FloatingPointError, match="NaN"):
        generate(broken, None, PROMPTS, max_new_tokens=2)
