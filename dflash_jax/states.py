"""Makes the decoder's states: arrays of fresh rows, in buckets of capacity."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.cache import KVCache
from dflash_jax.decode import NO_TOKEN, RUNNING, State
from dflash_jax.lookup import Length
from dflash_jax.models.draft import ring_size
from dflash_jax.pair import Draft, Target
from dflash_jax.sampling import RowSampling, Sampling
from dflash_jax.sharding import CACHE, place

PREFILL_CHUNK = 64
MIN_CAPACITY = 256
MAX_STOP_IDS = 32  # always that many, padded: their number must not recompile


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


def _placed(cache: KVCache) -> KVCache:
    """On the mesh of one process: of several, each reads the results of all rows, so XLA places them."""
    return place(cache, CACHE) if jax.process_count() == 1 else cache


def new_draft_cache(draft: Draft | Literal["lookup"], rows: int, size: int) -> KVCache | Length:
    """An empty context cache in the draft's own shape and dtype; a ring if all its layers slide."""
    if isinstance(draft, str):
        return Length.zeros(rows)
    c = draft.config
    dtype = draft.params["fc"]["weight"].dtype
    ring = ring_size(c, max(PREFILL_CHUNK, c.max_proposals + 1))
    cache = KVCache.zeros(
        c.num_hidden_layers, rows, c.num_key_value_heads, size, c.head_dim, dtype, ring
    )
    return _placed(cache)


def row_sampling(sampling: Sequence[Sampling], keys: jax.Array | None, rows: int) -> RowSampling:
    """The rows' settings as arrays; without any, greedy ones."""
    if not sampling:
        sampling = [Sampling()] * rows
    return RowSampling(
        **_put(
            temperature=np.array([s.temperature for s in sampling], np.float32),
            top_k=np.array([s.top_k for s in sampling], np.int32),
            top_p=np.array([s.top_p for s in sampling], np.float32),
        ),
        key=jax.random.split(jax.random.key(0), rows) if keys is None else jnp.copy(keys),
    )


def _put(**arrays: np.ndarray) -> dict[str, jax.Array]:
    """Arrays on the device without a program for each; copies, as a state is donated."""
    return jax.device_put(arrays, may_alias=False)


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
    cache = KVCache.zeros(
        c.num_hidden_layers, B, c.num_key_value_heads, size, c.head_dim, target.dtype
    )
    return State(
        **_put(
            tokens=tokens,
            length=length,
            limit=length + np.asarray(max_new_tokens, np.int32),
            stop_ids=padded_stop_ids(stop_token_ids, B),
            finish=np.full((B,), RUNNING, np.int32),
            rounds=np.zeros((B,), np.int32),
            committed=np.zeros((B, size), np.int32),
        ),
        sampling=row_sampling(sampling, keys, B),
        target=_placed(cache),
        draft=None,
    )


def padded_stop_ids(stop_token_ids: Sequence[int], rows: int) -> np.ndarray:
    ids = np.full((rows, MAX_STOP_IDS), NO_TOKEN, np.int32)
    ids[:, : len(stop_token_ids)] = stop_token_ids
    return ids
