"""Speculative decoding: prefill, one round, and the `lax.while_loop` over rounds.

Knows no model: it is handed two values with the functions of `TargetFns` and `DraftFns`. Plain
autoregressive decoding is the same loop without a draft and with blocks of one.

Between rounds a row's newest token, the *anchor*, at position `length - 1`, is in neither cache; both
hold positions 0..length-2. A round drafts Q - 1 proposals, lets the target read [anchor,
proposals] in one forward, commits the agreeing prefix and one token of the target's own, and
rewinds both caches by setting their length. Shapes never change, so the last rounds clamp what is
committed, not the block.
"""

import dataclasses
import functools
from typing import Any, Protocol, no_type_check, runtime_checkable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from dflash_jax import array_typing as at
from dflash_jax.acceptance import verify
from dflash_jax.cache import KVCache, read_rows, resize, write_rows
from dflash_jax.sampling import Picker, Proposals, RowSampling, Verify, sample

RUNNING, STOP, LENGTH = 0, 1, 2
NO_TOKEN = -1


@runtime_checkable
class TargetFns(Protocol):
    """The target's two functions. Hashable: it is a static argument of the jitted loop."""

    def forward(
        self, params: Any, tokens: at.Tokens, cache: KVCache
    ) -> tuple[at.Hidden, at.Context, KVCache]: ...

    def logits(self, params: Any, hidden: at.Hidden) -> at.Logits: ...


@runtime_checkable
class DraftFns(Protocol):
    """A draft's two functions. Its cache is any pytree with `length`, `replace` and `resize`."""

    def extend(self, params: Any, context: at.Context, cache: Any) -> Any:
        """Writes the context rows behind `cache.length`, which stays."""
        ...

    def propose(
        self, params: Any, text: at.Tokens, cache: Any, block_size: int, pick: Picker
    ) -> tuple[Proposals, Any]:
        """Proposes the `block_size - 1` tokens after the anchor.

        Args:
            text: Each row's tokens `[B, S]`; the anchor, its newest one, stands at `pick.anchor`,
                which is `cache.length`.
            pick: Picks tokens from logits as the round's verification wants it.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Models:
    """What the loop runs; static under jit.

    Attributes:
        target: The target's functions.
        draft: The draft's functions, or None for plain decoding.
        block_size: Q: tokens the target reads a round.
        verify: How proposals are judged.
        widths: Ascending block sizes, of which a round takes the one that recent acceptance calls for
            (see `choose_width`); the last is Q. Empty: always Q.
    """

    target: TargetFns
    draft: DraftFns | None
    block_size: int
    verify: Verify = "coupled"
    widths: tuple[int, ...] = ()

    def __post_init__(self):
        if self.block_size < 1:
            raise ValueError(f"{self.block_size=} must be at least 1")
        ascending = list(self.widths) == sorted(set(self.widths))
        if self.widths and not (
            ascending and self.widths[0] >= 1 and self.widths[-1] == self.block_size
        ):
            raise ValueError(f"{self.widths=} must ascend from 1 or more to {self.block_size=}")


@no_type_check  # JAX rebuilds it around shapes and shardings too
class State(struct.PyTreeNode):
    """Everything that a round reads and writes; every array leads with the batch axis.

    Attributes:
        tokens: Prompt and output; slots past `length` are scratch.
        length: Committed tokens of each row.
        limit: Length at which a row is full.
        stop_ids: Ids that end a row, padded with `NO_TOKEN`.
        finish: `RUNNING`, `STOP` or `LENGTH`.
        rounds: Rounds that each row has run.
        committed: Tokens committed in each of them.
        sampling: How each row picks its tokens.
        target: The target's cache.
        draft: The draft's cache, or None.
    """

    tokens: Int[Array, "B S"]
    length: at.Rows
    limit: at.Rows
    stop_ids: Int[Array, "B I"]
    finish: at.Rows
    rounds: at.Rows
    committed: Int[Array, "B S"]
    sampling: RowSampling
    target: KVCache
    draft: Any

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    @functools.partial(jax.jit, static_argnames=("size",))
    def resize(self, size: int) -> "State":
        """The same state with `size` slots a row, more than any row's length; one copy, in one program."""
        return self.replace(
            tokens=resize(self.tokens, size, axis=1),
            committed=resize(self.committed, size, axis=1),
            target=self.target.resize(size),
            draft=None if self.draft is None else self.draft.resize(size),
        )


@functools.partial(
    jax.jit, static_argnames=("target", "draft", "chunk"), donate_argnames=("state",)
)
def prefill(
    target: TargetFns, draft: DraftFns | None, params: Any, state: State, *, chunk: int
) -> State:
    """Runs every token that the target's cache lacks, and commits one token of the target's.

    The rows' tokens go through in chunks, in one compiled loop for every prompt length; each
    chunk's taps go straight into the draft's cache. Rows that lack nothing are left as they are.

    Args:
        target, draft: The models' functions; nothing else of `Models` matters here, or recompiles.
        params: Handed on to them.
        state: Donated. Needs `chunk` free slots behind every row.
        chunk: Tokens a chunk.
    """
    length = state.length
    forward = jax.jit(target.forward)  # traced once, for its shapes and for the loop

    def cond(carry):
        cache, _, _ = carry
        return jnp.any(cache.length < length)

    def step(carry):
        cache, context_cache, last = carry
        start = cache.length
        hidden, context, cache = forward(params, read_rows(state.tokens, start, chunk), cache)
        count = jnp.clip(length - start, 0, chunk)
        if draft is not None:
            context_cache = draft.extend(params, context, context_cache)
            context_cache = context_cache.replace(length=start + count)
        # The row's last token may be in this chunk: keep its hidden state for the first prediction.
        ends = (count > 0) & (start + count == length)
        column = jnp.clip(count - 1, 0, chunk - 1)
        state_at_end = jnp.take_along_axis(hidden, column[None, :, None], axis=2)
        last = jnp.where(ends[None, :, None], state_at_end, last)
        return cache.replace(length=start + count), context_cache, last

    hidden, _, _ = jax.eval_shape(forward, params, state.tokens[:, :chunk], state.target)
    last = jnp.zeros((*hidden.shape[:2], 1), hidden.dtype)
    pending = (state.target.length < length) & (state.finish == RUNNING)
    cache, context_cache, last = jax.lax.while_loop(cond, step, (state.target, state.draft, last))
    predicted = sample(target.logits(params, last), state.sampling, length[:, None])
    state = commit(
        state.replace(target=cache, draft=context_cache),
        predicted,
        jnp.zeros_like(length),
        pending,
    )
    return rewind(state)


@functools.partial(jax.jit, static_argnames=("models",), donate_argnames=("state",))
def decode(
    models: Models,
    params: Any,
    state: State,
    max_rounds: Int[Array, ""],
    least_running: Int[Array, ""] | np.int32 = np.int32(1),  # noqa: B008 (immutable)
) -> State:
    """Runs rounds until too few rows run, a row is out of slots, or `max_rounds` are done.

    Args:
        params: Handed on to the models' functions.
        state: Donated; made by `prefill` or an earlier call.
        max_rounds: An array, so that its value does not recompile.
        least_running: Fewer rows `RUNNING` end the loop, so that the others can be refilled.

    Returns:
        The state. Rows still `RUNNING` want another call: after `State.resize` if a row has fewer than
        Q free slots.
    """

    def cond(carry):
        state, done = carry
        room = jnp.all(state.length + models.block_size <= state.size)
        running = jnp.sum(state.finish == RUNNING)
        return (running >= least_running) & room & (done < max_rounds)

    def step(carry):
        if not models.widths:
            return decode_round(models, params, carry[0]), carry[1] + 1
        # A loop for each width, of which the rounds run one: a switch would copy the caches.
        for i, width in enumerate(models.widths):

            def chosen(carry, i=i):
                return cond(carry) & (choose_width(carry[0], models.widths) == i)

            def one(carry, width=width):
                return decode_round(models, params, carry[0], width), carry[1] + 1

            carry = jax.lax.while_loop(chosen, one, carry)
        return carry

    return jax.lax.while_loop(cond, step, (state, jnp.zeros((), jnp.int32)))[0]


def decode_round(models: Models, params: Any, state: State, width: int | None = None) -> State:
    """Drafts, verifies and commits one block of every running row.

    Args:
        width: The round's block size, at most Q; default Q. One drafts nothing.

    Source: arXiv 2602.06036, section 3; dflash 0.1.0 `dflash_generate`.
    """
    B, Q = len(state.length), width or models.block_size
    anchor, draft = state.length - 1, state.draft
    proposals = Proposals(jnp.zeros((B, 0), jnp.int32))
    if models.draft is not None and Q > 1:
        pick = Picker(state.sampling, anchor, models.verify)
        proposals, draft = models.draft.propose(params, state.tokens, draft, Q, pick)
        chex.assert_shape(proposals.tokens, (B, Q - 1))
    block = jnp.concatenate([read_rows(state.tokens, anchor, 1), proposals.tokens], axis=1)
    hidden, context, target = models.target.forward(params, block, state.target)
    logits = models.target.logits(params, hidden)
    predicted, accepted = verify(models.verify, logits, proposals, state.sampling, anchor)
    if models.draft is not None:
        draft = models.draft.extend(params, context, draft)
    running = state.finish == RUNNING
    state = state.replace(
        target=target, draft=draft,
        rounds=state.rounds + running,
    )  # fmt: skip
    before = state.length
    state = commit(state, predicted, accepted, running)
    count = (state.length - before)[:, None]
    # Round r's count stands in slot r - 1; rows that have ended write zeros behind theirs.
    committed = write_rows(state.committed, count, state.rounds - running, axis=1)
    return rewind(state.replace(committed=committed))


RECENT = 3  # rounds
PROBE = 4  # rounds from one try of the draft to the next while nothing is accepted


def choose_width(state: State, widths: tuple[int, ...]) -> Int[Array, ""]:
    """Index of the narrowest width above what any running row committed in its last `RECENT` rounds.

    So a row that accepts all that it is given gets a wider block in the next round; rows with fewer
    rounds behind them get all. While no row accepts anything, the draft is asked every `PROBE` rounds.
    """
    running = state.finish == RUNNING
    start = jnp.maximum(state.rounds - RECENT, 0)
    most = read_rows(state.committed, start, RECENT).max(axis=1)
    wanted = jnp.where(state.rounds < RECENT, widths[-1], most + 1)
    wanted = jnp.where(running, wanted, 0).max()
    rests = (wanted == 2) & (jnp.where(running, state.rounds, 0).max() % PROBE != 0)
    return jnp.sum(jnp.where(rests, 1, wanted) > jnp.array(widths[:-1]))


def commit(
    state: State, predicted: Int[Array, "B Q"], accepted: at.Rows, running: Bool[Array, " B"]
) -> State:
    """Appends the target's own tokens for the accepted prefix and one more, up to the limit or a stop id.

    Args:
        predicted: The target's token after each block slot.
        accepted: Proposals that agree, 0..Q-1.
        running: Rows that may still grow.
    """
    slot = jnp.arange(predicted.shape[1])[None, :]
    stops = jnp.any(predicted[:, :, None] == state.stop_ids[:, None, :], axis=2)
    before_stop = jnp.cumsum(stops, axis=1) - stops == 0  # the stop token itself is kept
    fits = slot < (state.limit - state.length)[:, None]
    kept = (slot <= accepted[:, None]) & before_stop & fits & running[:, None]
    length = state.length + kept.sum(axis=1, dtype=jnp.int32)
    ended = jnp.where(length >= state.limit, LENGTH, RUNNING)
    ended = jnp.where(jnp.any(stops & kept, axis=1), STOP, ended)
    return state.replace(
        tokens=write_rows(state.tokens, predicted, state.length, axis=1),
        length=length,
        finish=jnp.where(running, ended, state.finish).astype(jnp.int32),
    )


def rewind(state: State) -> State:
    """Sets both caches to hold all but each row's anchor; rejected rows become scratch."""
    length = state.length - 1
    draft = None if state.draft is None else state.draft.replace(length=length)
    return state.replace(target=state.target.replace(length=length), draft=draft)


@functools.partial(jax.jit, donate_argnames=("state",))
def insert_rows(state: State, fresh: State, rows: Int[Array, " R"]) -> State:
    """Puts the rows of `fresh` in the place of rows `rows` of `state` (donated)."""
    return jax.tree.map(lambda old, new: old.at[rows].set(new), state, fresh)
