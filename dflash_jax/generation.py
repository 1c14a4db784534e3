"""Generation: binds a pair's models to the decoder, picks capacities, returns plain lists."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.adapters import bind
from dflash_jax.cache import KVCache
from dflash_jax.decode import LENGTH, NO_TOKEN, RUNNING, STOP, State, decode, prefill
from dflash_jax.lookup import Length
from dflash_jax.pair import Draft, Target
from dflash_jax.sampling import RowSampling, Sampling

PREFILL_CHUNK = 64
MIN_CAPACITY = 256
MAX_STOP_IDS = 32  # always that many, padded: their number must not recompile
_MAX_ROUNDS = np.int32(2**31 - 1)


def capacity(tokens: int) -> int:
    """The bucket for `tokens` slots: the next power of two, at least `MIN_CAPACITY`."""
    return max(MIN_CAPACITY, 1 << (tokens - 1).bit_length())


def first_capacity(prompt_length: int, block_size: int) -> int:
    """The bucket in which rows of up to `prompt_length` tokens are prefilled and run a first round.

    Prefill writes whole chunks, from position 0 on in every row, so its last slot is the longest
    prompt's length rounded up: a row that ends a chunk or more earlier leaves a chunk of room.
    """
    chunks = -(-prompt_length // PREFILL_CHUNK)
    # Two slots behind the first new token, even for blocks of one: see `write_keys_values`.
    return capacity(max(chunks * PREFILL_CHUNK, prompt_length + max(block_size, 2)))


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns; every list has an entry a prompt.

    Attributes:
        tokens: Generated ids, without the prompt; a stop id that ended the row is kept.
        finish: Why the row ended: "stop" or "length".
        rounds: Tokens committed by each round (each pass of the target after prefill). The first
            token comes from prefill and belongs to no round.
    """

    tokens: list[list[int]]
    finish: list[Literal["stop", "length"]]
    rounds: list[list[int]]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round (tau); NaN if no round ran."""
        counts = [count for row in self.rounds for count in row]
        return float(np.mean(counts)) if counts else float("nan")


def generate(
    target: Target,
    draft: Draft | Literal["lookup"] | None,
    prompts: Sequence[Sequence[int]] | np.ndarray,
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] | None = None,
    block_size: int | None = None,
    lookup: bool = False,
) -> Generation:
    """Decodes greedily; with a draft the tokens are the same and the passes of the target fewer.

    Args:
        target: From `load_target`.
        draft: From `load_draft`; "lookup" to draft from the text itself; or None for plain
            autoregressive decoding.
        prompts: Token ids of each prompt, of any lengths.
        max_new_tokens: Exact, unless a stop id or the target's last position comes first.
        stop_token_ids: Default: the target's own.
        block_size: Q; default: the draft's.
        lookup: With a draft model: where the last tokens recur in the text, propose what followed instead.

    Raises:
        ValueError: For an empty or too long prompt, an id outside the vocabulary, or a number out of
            bounds.
        FloatingPointError: If the target's logits are not numbers.
    """
    stops = target.stop_token_ids if stop_token_ids is None else tuple(stop_token_ids)
    rows = [[int(i) for i in prompt] for prompt in prompts]
    _check(target, rows, max_new_tokens, stops)
    models, params = bind(target, draft, block_size, lookup=lookup)
    longest = max(len(p) for p in rows)
    positions = target.config.max_position_embeddings
    limits = [min(max_new_tokens, positions - len(p)) for p in rows]
    size = first_capacity(longest, models.block_size)
    state = new_state(target, rows, limits, stops, size)
    if draft is not None and models.draft is not None:
        state = state.replace(draft=new_draft_cache(draft, len(rows), size))
    state = prefill(models, params, state, chunk=PREFILL_CHUNK)
    while True:
        state = decode(models, params, state, _MAX_ROUNDS)
        finish = np.asarray(state.finish)
        if np.all(finish != RUNNING):
            break
        state = state.grow(2 * state.size)
    arrays = jax.device_get((state.tokens, state.length, state.committed, state.rounds))
    return _result(target, rows, arrays, finish)


def _check(
    target: Target, prompts: list[list[int]], max_new_tokens: int, stops: tuple[int, ...]
) -> None:
    V, positions = target.config.vocab_size, target.config.max_position_embeddings
    if not prompts:
        raise ValueError("prompts is empty")
    if max_new_tokens < 0:
        raise ValueError(f"{max_new_tokens=} must be at least 0")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {i} is empty")
        if len(prompt) > positions:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens; the target has {positions} positions"
            )
        outside = [t for t in prompt if not 0 <= t < V]
        if outside:
            raise ValueError(f"prompt {i} holds id {outside[0]}, outside the vocabulary [0, {V})")
    if len(stops) > MAX_STOP_IDS:
        raise ValueError(f"{len(stops)} stop_token_ids are more than {MAX_STOP_IDS}")
    outside = [t for t in stops if not 0 <= t < V]
    if outside:
        raise ValueError(f"stop_token_ids holds {outside[0]}, outside the vocabulary [0, {V})")


def _result(target: Target, prompts: list[list[int]], arrays, finish: np.ndarray) -> Generation:
    tokens, length, committed, rounds = arrays
    out = [t[len(p) : n].tolist() for p, t, n in zip(prompts, tokens, length)]
    if any(t >= target.config.vocab_size for row in out for t in row):
        raise FloatingPointError("the target's logits are NaN: its weights or the dtype overflow")
    names: dict[int, Literal["stop", "length"]] = {STOP: "stop", LENGTH: "length"}
    return Generation(
        out, [names[int(f)] for f in finish], [c[:n].tolist() for c, n in zip(committed, rounds)]
    )


def new_draft_cache(draft: Draft | Literal["lookup"], rows: int, size: int) -> KVCache | Length:
    """An empty context cache in the draft's own shape and dtype."""
    if isinstance(draft, str):
        return Length.zeros(rows)
    c = draft.config
    dtype = draft.params["fc"]["weight"].dtype
    return KVCache.zeros(c.num_hidden_layers, rows, c.num_key_value_heads, size, c.head_dim, dtype)


def row_sampling(sampling: Sequence[Sampling], keys: jax.Array | None, rows: int) -> RowSampling:
    """The rows' settings as arrays; without any, greedy ones."""
    if not sampling:
        sampling = [Sampling()] * rows
    return RowSampling(
        temperature=jnp.array([s.temperature for s in sampling], jnp.float32),
        top_k=jnp.array([s.top_k for s in sampling], jnp.int32),
        top_p=jnp.array([s.top_p for s in sampling], jnp.float32),
        key=jax.random.split(jax.random.key(0), rows) if keys is None else jnp.copy(keys),
    )


def new_state(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    stop_token_ids: Sequence[int],
    size: int,
    sampling: Sequence[Sampling] = (),
    keys: jax.Array | None = None,
) -> State:
    """A state of fresh rows with nothing prefilled and no draft cache; greedy without `sampling`."""
    B, c = len(prompts), target.config
    tokens = np.zeros((B, size), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    length = np.array([len(p) for p in prompts], np.int32)
    stops = np.full((B, MAX_STOP_IDS), NO_TOKEN, np.int32)
    stops[:, : len(stop_token_ids)] = stop_token_ids
    dtype = jax.tree.leaves(target.params)[0].dtype
    # Donated, so no two arrays may share a buffer: `array` copies, where `asarray` may not.
    return State(
        tokens=jnp.array(tokens),
        length=jnp.array(length),
        limit=jnp.array(length + np.asarray(max_new_tokens, np.int32)),
        stop_ids=jnp.array(stops),
        finish=jnp.full((B,), RUNNING, jnp.int32),
        rounds=jnp.zeros((B,), jnp.int32),
        committed=jnp.zeros((B, size), jnp.int32),
        sampling=row_sampling(sampling, keys, B),
        target=KVCache.zeros(
            c.num_hidden_layers, B, c.num_key_value_heads, size, c.head_dim, dtype
        ),
        draft=None,
    )
