"""Prompts on their way through the decoder: checked, prefilled, decoded, refilled and read."""

import collections
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.adapters import bind
from dflash_jax.decode import LENGTH, RUNNING, STOP, Models, State, decode, insert_rows, prefill
from dflash_jax.pair import Draft, Target
from dflash_jax.sampling import Sampling
from dflash_jax.states import (
    MAX_STOP_IDS,
    PREFILL_CHUNK,
    capacity,
    first_capacity,
    new_draft_cache,
    new_state,
    padded_stop_ids,
    row_sampling,
)

Finish = Literal["stop", "length"]
_FINISH: dict[int, Finish] = {STOP: "stop", LENGTH: "length", RUNNING: "length"}
_MAX_ROUNDS = 2**31 - 1


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
    draft: Draft | Literal["lookup"] | None
    models: Models
    params: Any
    prompts: list[list[int]]
    limits: list[int]
    stops: tuple[int, ...]
    sampling: list[Sampling]
    keys: jax.Array

    def start(self, which: Sequence[int], size: int = 0) -> State:
        """A prefilled state of some of the prompts, with at least `size` slots."""
        prompts, keys = [self.prompts[i] for i in which], _taken(self.keys, np.asarray(which))
        size = max(size, first_capacity(max(map(len, prompts)), self.models.block_size))
        limits, settings = [self.limits[i] for i in which], [self.sampling[i] for i in which]
        state = new_state(self.target, prompts, limits, self.stops, size, settings, keys)
        if self.draft is not None and self.models.draft is not None:
            state = state.replace(draft=new_draft_cache(self.draft, len(prompts), size))
        return prefill(
            self.models.target, self.models.draft, self.params, state, chunk=PREFILL_CHUNK
        )

    def resume(self, state: State) -> State:
        """Appends the prompts to the rows of an earlier state, and runs what its caches lack."""
        before = np.asarray(state.length)
        length = before + np.array([len(p) for p in self.prompts], np.int32)
        state = resized(
            state, capacity(int(length.max()) + max(PREFILL_CHUNK, self.models.block_size))
        )
        tokens = np.array(state.tokens)
        for row, start, prompt in zip(tokens, before, self.prompts):
            row[start : start + len(prompt)] = prompt
        rows = len(length)
        state = state.replace(
            tokens=jnp.array(tokens),
            length=jnp.array(length),
            limit=jnp.array(length + np.asarray(self.limits, np.int32)),
            stop_ids=jnp.array(padded_stop_ids(self.stops, rows)),
            finish=jnp.full((rows,), RUNNING, jnp.int32),
            rounds=jnp.zeros((rows,), jnp.int32),
            sampling=row_sampling(self.sampling, self.keys, rows),
        )
        return prefill(
            self.models.target, self.models.draft, self.params, state, chunk=PREFILL_CHUNK
        )

    def advance(self, state: State, max_rounds: int = _MAX_ROUNDS, least_running: int = 1) -> State:
        """Rounds, after growth where a row is out of slots."""
        longest = int(np.asarray(state.length).max())
        if longest + self.models.block_size > state.size:
            state = resized(state, 2 * state.size)
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

    def run_all(self, state: State | None, rows: int, one_state: bool) -> tuple[list[Row], State]:
        """Every prompt's row, in order, and the last state.

        Args:
            state: To continue; None starts with the first `rows` prompts.
            rows: Prompts decoded at once.
            one_state: Whether the last state must hold every prompt.
        """
        count = len(self.prompts)
        if rows < 1:
            raise ValueError(f"{rows=} must be at least 1")
        if (one_state or state is not None) and count > rows:
            raise ValueError(f"a state of {count} prompts does not fit {rows=}")
        last = self.start(range(min(rows, count))) if state is None else self.resume(state)
        found: dict[int, Row] = {}
        for index, row, state in self.run(last):
            found[index], last = row, state
        return [found[i] for i in range(count)], last

    def _refill(self, state: State, row: int, index: int) -> State:
        """Puts a prompt into the place of a row that has ended, in the bucket that the rows then need."""
        block_size, others = self.models.block_size, np.delete(np.asarray(state.length), row)
        needed = capacity(int(others.max(initial=0)) + block_size)
        size = max(needed, first_capacity(len(self.prompts[index]), block_size))
        fresh = self.start([index], size)
        return insert_rows(resized(state, size), fresh, jnp.array([row]))

    def read(self, state: State, row: int, index: int) -> Row:
        """What the row of prompt `index` holds."""
        # Whole arrays: a slice of each would be a program, and a wait, of its own.
        held = state.tokens, state.length, state.limit, state.committed, state.rounds, state.finish
        tokens, length, limit, committed, rounds, finish = (x[row] for x in jax.device_get(held))
        out = tokens[limit - self.limits[index] : length].tolist()
        if any(t >= self.target.config.vocab_size for t in out):
            raise FloatingPointError(
                "the target's logits are NaN: its weights or the dtype overflow"
            )
        return Row(out, _FINISH[int(finish)], committed[:rounds].tolist(), finish == RUNNING)


def resized(state: State, size: int) -> State:
    return state if size == state.size else state.resize(size)


def make_job(
    target: Target,
    draft: Draft | Literal["lookup"] | None,
    prompts: Any,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] | None,
    sampling: Sampling | Sequence[Sampling],
    key: jax.Array | None,
    state: State | None = None,
    **drafting: Any,
) -> Job:
    """Checks `generate`'s arguments; `drafting` are those that `adapters.bind` takes."""
    stops = target.stop_token_ids if stop_token_ids is None else tuple(stop_token_ids)
    prompts = [_token_ids(i, prompt) for i, prompt in enumerate(prompts)]
    before = _lengths(state, len(prompts))
    _check(target, prompts, before, max_new_tokens, stops)
    settings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    if len(settings) != len(prompts):
        raise ValueError(f"{len(settings)} sampling settings for {len(prompts)} prompts")
    rules = {s.verify for s in settings}
    if len(rules) > 1:
        raise ValueError(f"the prompts' sampling settings have different verify: {sorted(rules)}")
    models, params = bind(target, draft, verify=rules.pop(), **drafting)
    if state is not None and (state.draft is None) != (models.draft is None):
        raise ValueError("the state was made with a draft, or without one, unlike this call")
    positions = target.config.max_position_embeddings
    limits = [min(max_new_tokens, positions - n - len(p)) for n, p in zip(before, prompts)]
    keys = _keys(key, len(prompts))
    return Job(target, draft, models, params, prompts, limits, stops, settings, keys)


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


def _token_ids(index: int, prompt: Any) -> list[int]:
    """A prompt as plain integers, which is all that this library reads: no text, images or embeddings."""
    try:
        return [operator.index(i) for i in prompt]
    except TypeError as e:
        raise ValueError(f"prompt {index} must be a list of token ids, not {prompt!r:.60}") from e


def _lengths(state: State | None, prompts: int) -> list[int]:
    """Tokens that each row holds already."""
    if state is None:
        return [0] * prompts
    if any(x.is_deleted() for x in jax.tree.leaves(state)):
        raise ValueError("the state was consumed by an earlier call; keep the one that it returned")
    if len(state.length) != prompts:
        raise ValueError(f"{prompts} prompts for a state of {len(state.length)} rows")
    return np.asarray(state.length).tolist()


# One program each, not one for each step.
_folded = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))
_taken = jax.jit(lambda keys, which: keys[which])


def _keys(key: jax.Array | None, prompts: int) -> jax.Array:
    """A key a prompt."""
    key = jax.random.key(0) if key is None else key
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key has dtype {key.dtype}; make it with jax.random.key")
    if key.ndim == 0:
        return _folded(key, np.arange(prompts))
    if key.shape != (prompts,):
        raise ValueError(f"key has shape {key.shape}; give one key, or one a prompt: ({prompts},)")
    return key
