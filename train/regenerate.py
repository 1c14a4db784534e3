"""Lets the target answer a file of prompts, and keeps its answers with their features.

The batch runs through this project's own decoder: a *recorder* stands where a draft would, proposes
nothing and keeps each token's taps, so the features cost no second forward. Rows that end are
harvested and refilled every few rounds.

    python -m train.regenerate PROMPTS.jsonl OUT --rows 128 --max-new-tokens 160
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jaxtyping import Array, UInt16
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dflash_jax import array_typing as at
from dflash_jax.adapters import TargetModel
from dflash_jax.cache import grow, write_rows
from dflash_jax.decode import RUNNING, Models, State, decode, insert_rows, prefill
from dflash_jax.models.transformer import Transformer
from dflash_jax.pair import Target, load_target, load_tokenizer
from dflash_jax.sampling import Picker, Proposals
from dflash_jax.states import PREFILL_CHUNK, new_state
from train.store import Example, read_ids, shard_paths, write_shard

# Id, kind and token ids.
TokenizedPrompt = tuple[str, str, list[int]]

ROUNDS_A_CALL = 16
EXAMPLES_A_SHARD = 128


class Features(struct.PyTreeNode):
    """A draft's cache that keeps the raw taps. `values` is `[B, S, C * D]`, the bits of bfloat16."""

    values: UInt16[Array, "B S CD"]
    length: at.Rows

    def grow(self, size: int) -> "Features":
        return self.replace(values=grow(self.values, size, axis=1))


@dataclasses.dataclass(frozen=True)
class Recorder:
    """`decode.DraftFns` that proposes nothing and records the context."""

    def extend(self, params: Any, context: at.Context, cache: Features) -> Features:
        # XLA's CPU backend writes to a bfloat16 array by way of a float32 copy of all of it.
        rows = jax.lax.bitcast_convert_type(
            context.transpose(1, 2, 0).astype(jnp.bfloat16), jnp.uint16
        )
        return cache.replace(values=write_rows(cache.values, rows, cache.length, axis=1))

    def propose(
        self, params: Any, text: at.Tokens, cache: Features, block_size: int, pick: Picker
    ) -> tuple[Proposals, Features]:
        return Proposals(jnp.zeros((len(text), 0), text.dtype)), cache


def regenerate(
    target: Target,
    prompts: Sequence[TokenizedPrompt],
    target_layer_ids: tuple[int, ...],
    *,
    rows: int,
    refill: int,
    max_new_tokens: int,
    size: int,
) -> Iterator[Example]:
    """Yields an example for every prompt, in the order in which they end.

    Args:
        rows: Batch rows; a multiple of `refill`.
        refill: Rows that are harvested and refilled together.
        size: Cache slots a row.

    Raises:
        ValueError: If a prompt is empty or does not fit, a tap is no layer, or `rows` no multiple.
    """
    _check(target, prompts, target_layer_ids, rows, refill, max_new_tokens, size)
    models = Models(TargetModel(Transformer(target.config, target_layer_ids)), Recorder(), 1)
    params = {"target": target.params}
    queue = iter(prompts)

    def next_rows() -> tuple[State, list[TokenizedPrompt | None]]:
        """A prefilled state of the next `refill` prompts, and the owners of its rows."""
        batch = list(itertools.islice(queue, refill))
        owners = [*batch, *[None] * (refill - len(batch))]
        return _prefilled(
            target, models, params, owners, len(target_layer_ids), max_new_tokens, size
        ), owners

    parts, owned = zip(*(next_rows() for _ in range(rows // refill)))
    state = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    del parts
    owners = [owner for part in owned for owner in part]
    waiting = len(prompts) > rows
    while any(owner is not None for owner in owners):
        state = decode(models, params, state, np.int32(ROUNDS_A_CALL))
        finish = np.asarray(state.finish)
        ended = [i for i, owner in enumerate(owners) if owner is not None and finish[i] != RUNNING]
        if len(ended) < (refill if waiting else 1):
            continue
        ended = ended[:refill]
        yield from _harvest(state, ended, owners)
        fresh, new_owners = next_rows() if waiting else (None, [None] * len(ended))
        waiting = waiting and None not in new_owners
        if fresh is not None:
            state = insert_rows(state, fresh, jnp.asarray(ended))
        for i, owner in zip(ended, new_owners):
            owners[i] = owner


def _check(
    target: Target,
    prompts: Sequence[TokenizedPrompt],
    target_layer_ids: tuple[int, ...],
    rows: int,
    refill: int,
    max_new_tokens: int,
    size: int,
) -> None:
    outside = [i for i in target_layer_ids if not 0 <= i < target.config.num_hidden_layers]
    if outside:
        raise ValueError(f"taps {outside} are not in [0, {target.config.num_hidden_layers})")
    if rows % refill:
        raise ValueError(f"{rows=} is not a multiple of {refill=}")
    for name, _, ids in prompts:
        need = len(ids) + max(max_new_tokens + 1, PREFILL_CHUNK)
        if not ids or need > size:
            raise ValueError(
                f"prompt {name!r} has {len(ids)} tokens and needs {need} of {size=} slots"
            )


def replay(
    target: Target,
    responses: Sequence[Example],
    target_layer_ids: tuple[int, ...],
    *,
    rows: int,
    size: int,
) -> Iterator[Example]:
    """Yields stored responses with their features, computed again: prefill alone, nothing is decoded.

    Raises:
        ValueError: If a response does not fit.
    """
    stored = {e.id: e for e in responses}
    whole = [(e.id, e.kind, e.tokens.tolist()) for e in responses]
    # Room for a chunk behind every row, as `regenerate` asks of prompts.
    size += PREFILL_CHUNK
    for example in regenerate(
        target, whole, target_layer_ids, rows=rows, refill=rows, max_new_tokens=0, size=size
    ):
        yield dataclasses.replace(example, prompt_length=stored[example.id].prompt_length)


def _prefilled(
    target: Target,
    models: Models,
    params: Any,
    owners: Sequence[TokenizedPrompt | None],
    taps: int,
    max_new_tokens: int,
    size: int,
) -> State:
    """A state after prefill; rows without an owner ask for no tokens."""
    ids = [[0] if owner is None else owner[2] for owner in owners]
    limits = [0 if owner is None else max_new_tokens for owner in owners]
    state = new_state(target, ids, limits, target.stop_token_ids, size)
    width = taps * target.config.hidden_size
    values = jnp.zeros((len(owners), size, width), jnp.uint16)
    features = Features(values, jnp.zeros((len(owners),), jnp.int32))
    return prefill(
        models.target, models.draft, params, state.replace(draft=features), chunk=PREFILL_CHUNK
    )


@functools.partial(jax.jit)
def _rows(state: State, rows: Array):
    return state.tokens[rows], state.length[rows], state.draft.values[rows]


def _harvest(
    state: State, rows: Sequence[int], owners: Sequence[TokenizedPrompt | None]
) -> Iterator[Example]:
    """The examples of ended rows."""
    tokens, length, features = jax.device_get(_rows(state, jnp.asarray(rows)))
    for t, n, f, row in zip(tokens, length, features, rows):
        owner = owners[row]
        assert owner is not None  # only owned rows are harvested
        name, kind, ids = owner
        values = f[:n].copy().view(ml_dtypes.bfloat16)
        values[n - 1] = 0
        yield Example(name, kind, t[:n], len(ids), values)


def read_prompts(path: Path, tokenizer, max_prompt_tokens: int) -> list[TokenizedPrompt]:
    """(id, kind, chat-template token ids) of each line that is short enough; says how many are not.

    Raises:
        ValueError: If a line is no JSON object with these keys.
    """
    prompts, too_long = [], 0
    # Not splitlines, which also cuts at the line separators that JSON leaves inside a text.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        if not isinstance(row, dict) or not {"id", "kind", "text"} <= row.keys():
            raise ValueError(f"{path}, line {number}: a prompt needs id, kind and text")
        message = [{"role": "user", "content": row["text"]}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        if len(ids) <= max_prompt_tokens:
            prompts.append((row["id"], row["kind"], ids))
        else:
            too_long += 1
    if too_long:
        print(
            f"{path}: {too_long} prompts of over {max_prompt_tokens} tokens left out",
            file=sys.stderr,
        )
    return prompts


def answer_prompts(
    target: Target,
    prompts: Path,
    out: Path,
    target_layer_ids: tuple[int, ...],
    *,
    rows: int,
    refill: int,
    max_new_tokens: int,
    size: int,
    responses: Sequence[Example] = (),
) -> None:
    """Answers every prompt of a file that has no answer in `out` yet.

    Prompts too long for `size` are left out. Prompts of `responses` are not answered again: only
    their features are computed.
    """
    longest = size - max(max_new_tokens + 1, PREFILL_CHUNK)
    done = read_ids(out)
    todo = [p for p in read_prompts(prompts, load_tokenizer(target), longest) if p[0] not in done]
    wanted = {name for name, _, _ in todo}
    responses = [e for e in responses if e.id in wanted]
    known = {e.id for e in responses}
    unanswered = [p for p in todo if p[0] not in known]
    if not todo:
        return
    index = 1 + max((int(p.stem) for p in shard_paths(out)), default=-1)
    columns = (
        TextColumn(out.name),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task, tokens = progress.add_task("", total=len(todo), tokens=0), 0
        replayed = replay(target, responses, target_layer_ids, rows=refill, size=size)
        answered = regenerate(
            target, unanswered, target_layer_ids,
            rows=rows, refill=refill, max_new_tokens=max_new_tokens, size=size,
        )  # fmt: skip
        answers = itertools.chain(replayed if responses else (), answered if unanswered else ())
        while shard := list(itertools.islice(answers, EXAMPLES_A_SHARD)):
            write_shard(out, index, shard, target_layer_ids)
            index += 1
            tokens += sum(len(e.tokens) - e.prompt_length for e in shard)
            progress.update(task, advance=len(shard), tokens=tokens)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train.regenerate", description=__doc__.split("\n")[0]
    )
    parser.add_argument("prompts", type=Path, help="JSON lines with id, kind and text")
    parser.add_argument("out", type=Path, help="folder of shards; an interrupted run goes on")
    parser.add_argument(
        "--target", default=None, help="checkpoint of the target (default: embedded)"
    )
    parser.add_argument(
        "--taps", default="1,8,14,20,27", help="target layers whose states are kept"
    )
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--refill", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--size", type=int, default=256, help="cache slots a row")
    args = parser.parse_args(argv)
    try:
        taps = tuple(int(i) for i in args.taps.split(","))
        answer_prompts(
            load_target(args.target), args.prompts, args.out, taps,
            rows=args.rows, refill=args.refill, max_new_tokens=args.max_new_tokens, size=args.size,
        )  # fmt: skip
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
