import dataclasses
import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from fakes import DRAFT, TARGET, Decoder, own_script, prompts_of, random_draft, random_target

from dflash_jax.adapters import bind
from dflash_jax.cache import KVCache
from dflash_jax.checkpoint import keys
from dflash_jax.decode import decode, prefill
from dflash_jax.generation import generate
from dflash_jax.pair import Draft, Target
from dflash_jax.states import PREFILL_CHUNK, new_draft_cache, new_state

SIZE = 256
LENGTHS = (5, 17, 63, 64, 65, 99, 119, 120)


RING = dataclasses.replace(
    DRAFT, layer_types=("sliding_attention",) * 2, sliding_window=50, num_key_value_heads=2
)


@functools.cache
def compiled(rows, block_size, config=DRAFT):
    """`decode` for these shapes; blocks of one are plain decoding."""
    draft = None if block_size == 1 else random_draft(config)
    decoder = Decoder(random_target(), draft, block_size)
    state = new_state(decoder.target, [[1]] * rows, [1] * rows, (), SIZE)
    if draft is not None:
        state = state.replace(draft=new_draft_cache(draft, rows, SIZE))
    args = (decoder.params(own_script(state)), state, np.int32(1))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    return decode.lower(decoder.models, *shapes).compile(), state


def instructions(text, opcode):
    """(dimensions of the result, line) of every instruction of this kind, in every computation."""
    pattern = re.compile(rf"^\s+(?:ROOT )?%?\S+ = \w+\[([\d,]*)\]\S* {opcode}\(", re.MULTILINE)
    for match in pattern.finditer(text):
        line = text[match.start() : text.find("\n", match.start())].strip()
        yield tuple(int(n) for n in match[1].split(",") if n), line


def squeezed(shape):
    return tuple(n for n in shape if n > 1)


SHAPES = [(1, 1), (8, 1), (1, 8), (8, 8)]


def check_copies(program, state, kinds):
    caches = {squeezed(x.shape) for x in jax.tree.leaves((state.target, state.draft)) if x.ndim > 1}
    assert len(caches) == kinds
    copies = [(s, line) for s, line in instructions(program.as_text(), "copy")]
    found = [line for shape, line in copies if squeezed(shape) in caches]
    assert not found, f"{len(found)} copies, as {found[0]}"


@pytest.mark.parametrize(("rows", "block_size"), SHAPES)
def test_a_round_copies_no_cache(rows, block_size):
    check_copies(*compiled(rows, block_size), kinds=1 if block_size == 1 else 2)


@pytest.mark.parametrize(("rows", "block_size"), SHAPES)
def test_rotations_are_computed_once_a_model_and_not_in_every_layer(rows, block_size):
    text = compiled(rows, block_size)[0].as_text()
    tables = 1 if block_size == 1 else 2
    for opcode in ("sine", "cosine"):
        assert len(list(instructions(text, opcode))) == tables


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
def test_a_round_copies_no_ring(rows):
    program, state = compiled(rows, 8, RING)
    assert state.draft.size == 50 + PREFILL_CHUNK < SIZE
    check_copies(program, state, kinds=2)
    size = sum(x.nbytes for x in jax.tree.leaves((state.target, state.draft)))
    assert program.memory_analysis().temp_size_in_bytes < size
    assert program.memory_analysis().alias_size_in_bytes >= size


@pytest.mark.parametrize(("rows", "block_size"), SHAPES)
def test_the_loop_needs_less_memory_than_one_cache(rows, block_size):
    program, state = compiled(rows, block_size)
    memory = program.memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves((state.target, state.draft)))
    assert memory.temp_size_in_bytes < size
    assert memory.alias_size_in_bytes >= size, "the state is not updated in place"


@pytest.mark.parametrize("rows", [1, 8])
def test_weights_are_the_left_operand_of_every_projection(rows):
    program, _ = compiled(rows, 8)
    text = program.as_text()
    shapes = dict(re.findall(r"%?([\w.\-]+) = \w+\[([\d,]*)\]", text))
    shapes |= dict(re.findall(r"%?([\w.\-]+): \w+\[([\d,]*)\]", text))
    columns, seen = rows * 8, set()
    for _, line in instructions(text, "dot"):
        left, right = (
            shapes[name] for name in re.search(r"dot\(%?(\S+), %?(\S+)\)", line).groups()
        )
        left, right = ([int(n) for n in s.split(",")] for s in (left, right))
        if len(left) == 2 and left[1] == right[0] and right[1:] == [columns]:
            assert "lhs_contracting_dims={1}, rhs_contracting_dims={0}" in line
            seen.add(tuple(left))
    for c in (TARGET, DRAFT):
        D, F, H = c.hidden_size, c.intermediate_size, c.head_dim
        for out_in in (
            (F, D),
            (D, F),
            (c.num_attention_heads * H, D),
            (c.num_key_value_heads * H, D),
        ):
            assert out_in in seen, f"no product with the weight {out_in} on the left"
    assert (TARGET.vocab_size, TARGET.hidden_size) in seen


@pytest.mark.parametrize("block_size", [1, 8])
def test_a_run_never_talks_to_the_host(block_size):
    text = compiled(1, block_size)[0].as_text()
    assert " while(" in text
    for word in ("callback", "infeed", "outfeed", " send(", " recv(", "host_compute"):
        assert word not in text


def test_layers_of_a_kind_are_lowered_once():
    """Tracing is most of a warm start: the program's text must not grow by a layer's products."""

    def products(layers):
        config = dataclasses.replace(TARGET, num_hidden_layers=layers, layer_types=())
        target = random_target(config)
        models, params = bind(target, None)
        state = new_state(target, [[1]], [1], (), 256)
        return decode.lower(models, params, state, np.int32(1)).as_text().count("dot_general")

    assert products(4) == products(2)


def test_the_donated_state_is_gone_after_the_call():
    decoder = Decoder(random_target(), random_draft(), 4)
    fresh = new_state(decoder.target, prompts_of(3, 4), [9, 9], (), 64)
    fresh = fresh.replace(draft=new_draft_cache(decoder.draft, 2, 64))
    state = decoder.prefill(fresh)
    assert all(x.is_deleted() for x in jax.tree.leaves((fresh.target, fresh.draft)))
    after = decoder.decode(state)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.target, state.draft)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))


@pytest.mark.slow
def test_the_number_of_programs_follows_rows_block_size_and_capacity_only():
    target, draft = random_target(seed=5), random_draft(seed=6)

    def programs(prompts, block_size=4, **options):
        before = prefill._cache_size(), decode._cache_size()
        generate(target, draft, prompts, block_size=block_size, **options)
        return prefill._cache_size() - before[0], decode._cache_size() - before[1]

    jax.clear_caches()
    assert programs(prompts_of(9), max_new_tokens=5) == (1, 1)
    for n in LENGTHS:
        stops = range(n % 11)
        assert programs(prompts_of(n), max_new_tokens=n % 40, stop_token_ids=stops) == (0, 0), n
    assert programs(prompts_of(9, 30), max_new_tokens=5) == (1, 1)
    assert programs(prompts_of(80, 2), max_new_tokens=50) == (0, 0)
    assert programs(prompts_of(9), max_new_tokens=5, block_size=2) == (0, 1)
    # 190 tokens and a prompt do not fit into 256 slots with room for a block: one growth.
    assert programs(prompts_of(100), max_new_tokens=190) == (0, 1)
    assert programs(prompts_of(120), max_new_tokens=170) == (0, 0)


@pytest.mark.slow
def test_growth_makes_one_program_for_each_doubling():
    target = random_target(seed=5)
    jax.clear_caches()
    before = decode._cache_size()
    generate(target, None, prompts_of(20, 40, 60), max_new_tokens=400, stop_token_ids=())
    assert decode._cache_size() - before == 2  # 256 and 512 slots


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_round_of_the_embedded_pair_copies_no_cache(block_size, dtype):
    """SmolLM2-135M's shape with a draft of two layers, from shapes alone."""
    layers = 30
    config = dataclasses.replace(
        TARGET, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        num_hidden_layers=layers, vocab_size=49152, max_position_embeddings=8192, layer_types=(),
        tie_word_embeddings=True,
    )  # fmt: skip
    draft = dataclasses.replace(
        DRAFT, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        num_hidden_layers=2, vocab_size=49152, max_position_embeddings=8192, layer_types=(), block_size=8,
        num_target_layers=layers, target_layer_ids=(1, 8, 14, 20, 27),
    )  # fmt: skip

    def params(config):
        shapes = keys.expected_shapes(config)
        return keys.nest({path: jax.ShapeDtypeStruct(s, dtype) for path, s in shapes.items()})

    target = Target(config, params(config), (), Path())
    models, tree = bind(target, Draft(draft, params(draft), Path()), block_size)

    def state():
        rows = new_state(target, [[1]], [1], (), 2 * SIZE)
        if models.draft is None:
            return rows
        cache = KVCache.zeros(2, 1, 3, 2 * SIZE, 64, dtype)
        return rows.replace(draft=cache)

    program = decode.lower(models, tree, jax.eval_shape(state), np.int32(1)).compile()
    text = program.as_text()
    cache = (3, 2 * SIZE, 64)
    for opcode in ("copy", "convert", "transpose"):
        found = [line for shape, line in instructions(text, opcode) if squeezed(shape) == cache]
        assert not found or (dtype == "bfloat16" and opcode == "convert"), (
            opcode,
            len(found),
            found[0],
        )
    if dtype == "float32":
        slot, layer = 49152 * 4, 2 * 3 * 2 * SIZE * 64 * 4
        # Three times the logits, and what sampling with a wide filter sorts of one slot at a time.
        bound = 3 * block_size * slot + 10 * slot + layer
        assert program.memory_analysis().temp_size_in_bytes < bound
