"""Generation: binds a pair's models to the decoder, picks capacities, returns plain lists."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.adapters import bind
from dflash_jax.cache import KVCache
from dflash_jax.decode import (
    LENGTH,
    NO_TOKEN,
    RUNNING,
    STOP,
    Models,
    State,
    decode,
    insert_rows,
    prefill,
)
from dflash_jax.models.draft import ring_size
from dflash_jax.pair import Draft, Target
from dflash_jax.sampling import RowSampling, Sampling

PREFILL_CHUNK = 64
MIN_CAPACITY = 256
MAX_STOP_IDS = 32  # always that many, padded: their number must not recompile
MAX_ROWS = 16
_MAX_ROUNDS = 2**31 - 1
Finish = Literal["stop", "length"]
_FINISH: dict[int, Finish] = {STOP: "stop", LENGTH: "length", RUNNING: "length"}


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


class Row(NamedTuple):
    """What a row of a state holds so far: its new tokens, and tokens by round."""

    tokens: list[int]
    finish: Finish
    rounds: list[int]
    running: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """Prompts on their way through the decoder.

    Attributes:
        target, draft: The pair.
        models, params: What the decoder is handed.
        prompts: Token ids; of a continued state, those that each row is continued with.
        limits: New tokens of each prompt.
        stops: Ids that end a row.
        sampling, keys: Of each prompt.
    """

    target: Target
    draft: Draft | None
    models: Models
    params: Any
    prompts: list[list[int]]
    limits: list[int]
    stops: tuple[int, ...]
    sampling: list[Sampling]
    keys: jax.Array

    @classmethod
    def make(
        cls,
        target,
        draft,
        prompts,
        max_new_tokens,
        stop_token_ids,
        block_size,
        sampling,
        key,
        state,
    ) -> "Job":
        """Checks `generate`'s arguments."""
        stops = target.stop_token_ids if stop_token_ids is None else tuple(stop_token_ids)
        prompts = [[int(i) for i in prompt] for prompt in prompts]
        before = _lengths(state, len(prompts))
        _check(target, prompts, before, max_new_tokens, stops)
        settings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(settings) != len(prompts):
            raise ValueError(f"{len(settings)} sampling settings for {len(prompts)} prompts")
        rules = {s.verify for s in settings}
        if len(rules) > 1:
            raise ValueError(
                f"the prompts' sampling settings have different verify: {sorted(rules)}"
            )
        models, params = bind(target, draft, block_size, rules.pop())
        if state is not None and (state.draft is None) != (models.draft is None):
            raise ValueError("the state was made with a draft, or without one, unlike this call")
        positions = target.config.max_position_embeddings
        limits = [min(max_new_tokens, positions - n - len(p)) for n, p in zip(before, prompts)]
        keys = _keys(key, len(prompts))
        return cls(target, draft, models, params, prompts, limits, stops, settings, keys)

    def start(self, which: Sequence[int], size: int = 0) -> State:
        """A prefilled state of some of the prompts, with at least `size` slots."""
        prompts, keys = [self.prompts[i] for i in which], self.keys[np.asarray(which)]
        size = max(size, first_capacity(max(map(len, prompts)), self.models.block_size))
        limits, settings = [self.limits[i] for i in which], [self.sampling[i] for i in which]
        state = new_state(self.target, prompts, limits, self.stops, size, settings, keys)
        if self.draft is not None and self.models.draft is not None:
            state = state.replace(draft=new_draft_cache(self.draft, len(prompts), size))
        return prefill(self.models, self.params, state, chunk=PREFILL_CHUNK)

    def resume(self, state: State) -> State:
        """Appends the prompts to the rows of an earlier state, and runs what its caches lack."""
        before = np.asarray(state.length)
        length = before + np.array([len(p) for p in self.prompts], np.int32)
        size = capacity(int(length.max()) + max(PREFILL_CHUNK, self.models.block_size))
        if size > state.size:
            state = state.grow(size)
        tokens = np.array(state.tokens)
        for row, start, prompt in zip(tokens, before, self.prompts):
            row[start : start + len(prompt)] = prompt
        rows = len(length)
        state = state.replace(
            tokens=jnp.array(tokens),
            length=jnp.array(length),
            limit=jnp.array(length + np.asarray(self.limits, np.int32)),
            stop_ids=jnp.array(_stop_ids(self.stops, rows)),
            finish=jnp.full((rows,), RUNNING, jnp.int32),
            rounds=jnp.zeros((rows,), jnp.int32),
            sampling=row_sampling(self.sampling, self.keys, rows),
        )
        return prefill(self.models, self.params, state, chunk=PREFILL_CHUNK)

    def advance(self, state: State, max_rounds: int = _MAX_ROUNDS, least_running: int = 1) -> State:
        """Rounds, after growth where a row is out of slots."""
        longest = int(np.asarray(state.length).max())
        if longest + self.models.block_size > state.size:
            state = state.grow(2 * state.size)
        limits = np.int32(max_rounds), np.int32(least_running)
        return decode(self.models, self.params, state, *limits)

    def run(self, state: State) -> Iterator[tuple[int, Row, State]]:
        """Yields (prompt, its row, the state) as rows end; further prompts take their places."""
        owners: list[int | None] = list(range(len(state.length)))
        waiting = collections.deque(range(len(owners), len(self.prompts)))
        while True:
            finish = np.asarray(state.finish)
            for row, owner in enumerate(owners):
                if owner is None or finish[row] == RUNNING:
                    continue
                yield owner, self.read(state, row, owner), state
                owners[row] = new = waiting.popleft() if waiting else None
                if new is not None:
                    state = self._refill(state, row, new)
            running = sum(owner is not None for owner in owners)
            if not running:
                return
            # A refilled row may have ended in prefill: look again before rounds are run.
            if np.any(np.asarray(state.finish) == RUNNING):
                state = self.advance(state, least_running=running if waiting else 1)

    def _refill(self, state: State, row: int, index: int) -> State:
        size = first_capacity(len(self.prompts[index]), self.models.block_size)
        if size > state.size:
            state = state.grow(size)
        return insert_rows(state, self.start([index], state.size), jnp.array([row]))

    def read(self, state: State, row: int, index: int) -> Row:
        """What the row of prompt `index` holds."""
        arrays = (
            state.tokens,
            state.length,
            state.limit,
            state.committed,
            state.rounds,
            state.finish,
        )
        tokens, length, limit, committed, rounds, finish = jax.device_get([x[row] for x in arrays])
        out = tokens[limit - self.limits[index] : length].tolist()
        if any(t >= self.target.config.vocab_size for t in out):
            raise FloatingPointError(
                "the target's logits are NaN: its weights or the dtype overflow"
            )
        return Row(out, _FINISH[int(finish)], committed[:rounds].tolist(), finish == RUNNING)


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns; every list has an entry a prompt.

    Attributes:
        tokens: Generated ids, without the prompt; a stop id that ended the row is kept.
        finish: Why the row ended: "stop" or "length".
        rounds: Tokens committed by each round (each pass of the target after prefill). The first
            token comes from prefill and belongs to no round.
        state: What `generate(..., state=...)` goes on from, if it was asked to be kept.
    """

    tokens: list[list[int]]
    finish: list[Finish]
    rounds: list[list[int]]
    state: State | None = None

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round (tau); NaN if no round ran."""
        counts = [count for row in self.rounds for count in row]
        return float(np.mean(counts)) if counts else float("nan")


def generate(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]] | np.ndarray,
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] | None = None,
    block_size: int | None = None,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 (immutable)
    key: jax.Array | None = None,
    rows: int = MAX_ROWS,
    state: State | None = None,
    keep_state: bool = False,
) -> Generation:
    """Decodes; with a draft the tokens are the same and the passes of the target fewer.

    Args:
        target: From `load_target`.
        draft: From `load_draft`, or None for plain autoregressive decoding.
        prompts: Token ids of each prompt, of any lengths. With `state`, what each of its rows is
            continued with; may be empty.
        max_new_tokens: Exact, unless a stop id or the target's last position comes first.
        stop_token_ids: Default: the target's own.
        block_size: Q; default: the draft's.
        sampling: For all prompts, or one a prompt (with the same `verify`); greedy by default.
        key: A key a prompt, `[len(prompts)]`, or one, from which prompt i's is folded; default
            `jax.random.key(0)`. A prompt's text depends on its own key alone, not on its neighbours.
        rows: Prompts decoded at once; as rows end, further prompts take their places.
        state: An earlier call's, with the same draft. It is consumed, and its rows go on: nothing that
            is cached is computed again.
        keep_state: Return the state; it holds the caches, and there must be at most `rows` prompts.

    Raises:
        ValueError: For an empty or too long prompt, an id outside the vocabulary, or a number out of
            bounds.
        FloatingPointError: If the target's logits are not numbers.
    """
    job = Job.make(
        target, draft, prompts, max_new_tokens, stop_token_ids, block_size, sampling, key, state
    )
    if rows < 1:
        raise ValueError(f"{rows=} must be at least 1")
    if (keep_state or state is not None) and len(job.prompts) > rows:
        raise ValueError(f"a state of {len(job.prompts)} prompts does not fit {rows=}")
    found: dict[int, Row] = {}
    begun = job.start(range(min(rows, len(job.prompts)))) if state is None else job.resume(state)
    last = begun
    for index, row, last in job.run(begun):  # noqa: B007 (the last one is kept)
        found[index] = row
    done = [found[i] for i in range(len(job.prompts))]
    kept = last if keep_state else None
    return Generation(
        [r.tokens for r in done], [r.finish for r in done], [r.rounds for r in done], kept
    )


def stream(
    target: Target,
    draft: Draft | None,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] | None = None,
    block_size: int | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    key: jax.Array | None = None,
    rounds: int = 1,
) -> Iterator[list[int]]:
    """Yields one prompt's new tokens as they are committed, the same ones as `generate`.

    Args:
        rounds: Rounds between two pieces. For the rest see `generate`.

    Returns:
        (As the generator's return value) what `generate` returns.

    Raises:
        ValueError, FloatingPointError: As `generate`, before the first piece.
    """
    job = Job.make(
        target, draft, [prompt], max_new_tokens, stop_token_ids, block_size, sampling, key, None
    )
    if rounds < 1:
        raise ValueError(f"{rounds=} must be at least 1")

    def pieces():
        state, said = job.start([0]), 0
        while True:
            row = job.read(state, 0, 0)
            if row.tokens[said:]:
                yield row.tokens[said:]
            said = len(row.tokens)
            if row.running:
                state = job.advance(state, max_rounds=rounds)
            else:
                return Generation([row.tokens], [row.finish], [row.rounds])

    return pieces()


def _check(
    target: Target,
    prompts: list[list[int]],
    before: list[int],
    max_new_tokens: int,
    stops: tuple[int, ...],
) -> None:
    V, positions = target.config.vocab_size, target.config.max_position_embeddings
    if not prompts:
        raise ValueError("prompts is empty")
    if max_new_tokens < 0:
        raise ValueError(f"{max_new_tokens=} must be at least 0")
    for i, (start, prompt) in enumerate(zip(before, prompts)):
        if not start + len(prompt):
            raise ValueError(f"prompt {i} is empty")
        if start + len(prompt) > positions:
            raise ValueError(
                f"prompt {i} has {start + len(prompt)} tokens; the target has {positions} positions"
            )
        outside = [t for t in prompt if not 0 <= t < V]
        if outside:
            raise ValueError(f"prompt {i} holds id {outside[0]}, outside the vocabulary [0, {V})")
    if len(stops) > MAX_STOP_IDS:
        raise ValueError(f"{len(stops)} stop_token_ids are more than {MAX_STOP_IDS}")
    outside = [t for t in stops if not 0 <= t < V]
    if outside:
        raise ValueError(f"stop_token_ids holds {outside[0]}, outside the vocabulary [0, {V})")


def _lengths(state: State | None, prompts: int) -> list[int]:
    """Tokens that each row holds already."""
    if state is None:
        return [0] * prompts
    if any(x.is_deleted() for x in jax.tree.leaves(state)):
        raise ValueError("the state was consumed by an earlier call; keep the one that it returned")
    if len(state.length) != prompts:
        raise ValueError(f"{prompts} prompts for a state of {len(state.length)} rows")
    return np.asarray(state.length).tolist()


def _keys(key: jax.Array | None, prompts: int) -> jax.Array:
    """A key a prompt."""
    key = jax.random.key(0) if key is None else key
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key has dtype {key.dtype}; make it with jax.random.key")
    if key.ndim == 0:
        return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(prompts))
    if key.shape != (prompts,):
        raise ValueError(f"key has shape {key.shape}; give one key, or one a prompt: ({prompts},)")
    return key


def new_draft_cache(draft: Draft, rows: int, size: int) -> KVCache:
    """An empty context cache in the draft's own shape and dtype; a ring if all its layers slide."""
    c = draft.config
    dtype = draft.params["fc"]["weight"].dtype
    ring = ring_size(c, max(PREFILL_CHUNK, c.max_proposals + 1))
    return KVCache.zeros(
        c.num_hidden_layers, rows, c.num_key_value_heads, size, c.head_dim, dtype, ring
    )


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
    dtype = jax.tree.leaves(target.params)[0].dtype
    # Donated, so no two arrays may share a buffer: `array` copies, where `asarray` may not.
    return State(
        tokens=jnp.array(tokens),
        length=jnp.array(length),
        limit=jnp.array(length + np.asarray(max_new_tokens, np.int32)),
        stop_ids=jnp.array(_stop_ids(stop_token_ids, B)),
        finish=jnp.full((B,), RUNNING, jnp.int32),
        rounds=jnp.zeros((B,), jnp.int32),
        committed=jnp.zeros((B, size), jnp.int32),
        sampling=row_sampling(sampling, keys, B),
        target=KVCache.zeros(
            c.num_hidden_layers, B, c.num_key_value_heads, size, c.head_dim, dtype
        ),
        draft=None,
    )


def _stop_ids(stop_token_ids: Sequence[int], rows: int) -> np.ndarray:
    ids = np.full((rows, MAX_STOP_IDS), NO_TOKEN, np.int32)
    ids[:, : len(stop_token_ids)] = stop_token_ids
    return ids
