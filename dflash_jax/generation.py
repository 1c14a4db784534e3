"""The public face of decoding: `generate` and `stream`."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import numpy as np

from dflash_jax.decode import State
from dflash_jax.jobs import Finish, make_job
from dflash_jax.pair import Draft, Target
from dflash_jax.sampling import Sampling

MAX_ROWS = 16


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
    draft: Draft | Literal["lookup"] | None,
    prompts: Sequence[Sequence[int]] | np.ndarray,
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] | None = None,
    block_size: int | None = None,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 (immutable)
    key: jax.Array | None = None,
    lookup: bool = False,
    adapt_width: bool = False,
    rows: int = MAX_ROWS,
    state: State | None = None,
    keep_state: bool = False,
) -> Generation:
    """Decodes; with a draft the tokens are the same and the passes of the target fewer.

    Args:
        target: From `load_target`.
        draft: From `load_draft`; "lookup" to draft from the text itself; or None for plain
            autoregressive decoding.
        prompts: Token ids of each prompt, of any lengths. With `state`, what each of its rows is
            continued with; may be empty.
        max_new_tokens: Exact, unless a stop id or the target's last position comes first.
        stop_token_ids: Default: the target's own.
        block_size: Q; default: the draft's.
        sampling: For all prompts, or one a prompt (with the same `verify`); greedy by default.
        key: A key a prompt, `[len(prompts)]`, or one, from which prompt i's is folded; default
            `jax.random.key(0)`. A prompt's text depends on its own key alone, not on its neighbours.
        lookup: With a draft model: where the last tokens recur in the text, propose what followed
            instead.
        adapt_width: Draft and read smaller blocks while few proposals are accepted.
        rows: Prompts decoded at once; as rows end, further prompts take their places.
        state: An earlier call's, with the same draft. It is consumed, and its rows go on: nothing that
            is cached is computed again.
        keep_state: Return the state; it holds the caches, and there must be at most `rows` prompts.

    Raises:
        ValueError: For an empty or too long prompt, an id outside the vocabulary, or a number out of
            bounds.
        FloatingPointError: If the target's logits are not numbers.
    """
    job = make_job(
        target, draft, prompts, max_new_tokens, stop_token_ids, sampling, key, state,
        block_size=block_size, lookup=lookup, adapt_width=adapt_width,
    )  # fmt: skip
    done, last = job.run_all(state, rows, keep_state)
    tokens, finish = [row.tokens for row in done], [row.finish for row in done]
    return Generation(tokens, finish, [r.rounds for r in done], last if keep_state else None)


def stream(
    target: Target,
    draft: Draft | Literal["lookup"] | None,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] | None = None,
    block_size: int | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    key: jax.Array | None = None,
    lookup: bool = False,
    adapt_width: bool = False,
    rounds: int = 1,
    state: State | None = None,
    keep_state: bool = False,
) -> Iterator[list[int]]:
    """Yields one prompt's new tokens as they are committed, the same ones as `generate`.

    Args:
        rounds: Rounds between two pieces. For the rest see `generate`.

    Returns:
        (As the generator's return value) what `generate` returns.

    Raises:
        ValueError, FloatingPointError: As `generate`, before the first piece.
    """
    job = make_job(
        target, draft, [prompt], max_new_tokens, stop_token_ids, sampling, key, state,
        block_size=block_size, lookup=lookup, adapt_width=adapt_width,
    )  # fmt: skip
    if rounds < 1:
        raise ValueError(f"{rounds=} must be at least 1")

    def pieces():
        now, said = job.start([0]) if state is None else job.resume(state), 0
        while True:
            row = job.read(now, 0, 0)
            if row.tokens[said:]:
                yield row.tokens[said:]
            said = len(row.tokens)
            if row.running:
                now = job.advance(now, max_rounds=rounds)
            else:
                last = now if keep_state else None
                return Generation([row.tokens], [row.finish], [row.rounds], last)

    return pieces()
