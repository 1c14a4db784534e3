"""Lets the target answer a file of prompts, and keeps its answers with their features.

The batch runs through this project's own decoder: a *recorder* stands where a draft would, proposes
nothing and keeps each token's taps, so the features cost no second forward. Rows that end are
harvested and refilled every few rounds.

    python -m train.regenerate PROMPTS.jsonl OUT --rows 128 --max-new-tokens 160
"""

import argparse
import functools
import itertools
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array

from dflash_jax import command
from dflash_jax.adapters import TargetModel
from dflash_jax.decode import RUNNING, Models, State, decode, insert_rows
from dflash_jax.models.transformer import Transformer
from dflash_jax.pair import Target, load_target, load_tokenizer
from dflash_jax.sampling import Sampling
from dflash_jax.states import PREFILL_CHUNK, new_state
from train.chat import question, read_rows
from train.features import (
    EXAMPLES_A_SHARD,
    Recorder,
    check_taps,
    origin_of,
    parse_taps,
    recorded,
    with_features,
)
from train.store import Example, Origin, load_examples, read_ids, shard_paths, write_shard

# Id, kind and token ids.
TokenizedPrompt = tuple[str, str, list[int]]

ROUNDS_A_CALL = 16


def regenerate(
    target: Target,
    prompts: Sequence[TokenizedPrompt],
    target_layer_ids: tuple[int, ...],
    *,
    rows: int,
    refill: int,
    max_new_tokens: int,
    size: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    seed: int = 0,
) -> Iterator[Example]:
    """Yields an example for every prompt, in the order in which they end.

    A sampled answer depends on the seed and the prompt's id, not on its row or its neighbours.

    Args:
        rows: Batch rows; a multiple of `refill`.
        refill: Rows that are harvested and refilled together.
        size: Cache slots a row.
        sampling: How the target answers.
        seed: Of sampled answers.

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
        state = _fresh(target, owners, max_new_tokens, size, sampling, seed)
        return recorded(target, state, target_layer_ids), owners

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
    check_taps(target, target_layer_ids)
    if rows % refill:
        raise ValueError(f"{rows=} is not a multiple of {refill=}")
    for name, _, ids in prompts:
        need = len(ids) + max(max_new_tokens + 1, PREFILL_CHUNK)
        if not ids or need > size:
            raise ValueError(
                f"prompt {name!r} has {len(ids)} tokens and needs {need} of {size=} slots"
            )


def _fresh(
    target: Target,
    owners: Sequence[TokenizedPrompt | None],
    max_new_tokens: int,
    size: int,
    sampling: Sampling,
    seed: int,
) -> State:
    """A state before prefill; rows without an owner ask for no tokens."""
    names, ids, limits = zip(
        *(("", [0], 0) if o is None else (o[0], o[2], max_new_tokens) for o in owners)
    )
    numbers = jnp.array([zlib.crc32(name.encode()) for name in names], jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)
    return new_state(
        target, ids, limits, target.stop_token_ids, size, [sampling] * len(owners), keys
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
        yield Example.response(name, kind, t[:n], len(ids), values)


def read_prompts(path: Path, tokenizer, max_prompt_tokens: int) -> list[TokenizedPrompt]:
    """(id, kind, chat-template token ids) of each line that is short enough; says how many are not.

    A line holds `text`, or a conversation as in `chat.read_documents`, whose turns up to the last
    question are the prompt. Without `id` and `kind` these are the line's place and the file's name.

    Raises:
        ValueError: If a line is malformed, or two have one id.
    """
    prompts: dict[str, TokenizedPrompt] = {}
    too_long = 0
    for where, row in read_rows(path):
        messages = question(where, row)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        name, kind = str(row.get("id", where)), str(row.get("kind", path.stem))
        if name in prompts:
            raise ValueError(f"{where}: another line has the id {name!r} too")
        if len(ids) <= max_prompt_tokens:
            prompts[name] = (name, kind, ids)
        else:
            too_long += 1
    if too_long:
        print(
            f"{path}: {too_long} prompts of over {max_prompt_tokens} tokens left out",
            file=sys.stderr,
        )
    return list(prompts.values())


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
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    seed: int = 0,
    origin: Origin | None = None,
) -> None:
    """Answers every prompt of a file that has no answer in `out` yet.

    Prompts too long for `size` are left out. Prompts of `responses` are not answered again: only
    their features are computed.

    Args:
        target: Answers.
        prompts: File, see `read_prompts`.
        out: Folder of the store.
        target_layer_ids: Taps.
        rows, refill, max_new_tokens, size, sampling, seed: See `regenerate`.
        responses: Known answers; their features, if any, are not read.
        origin: `features.origin_of` the target, where the caller has it.

    Raises:
        ValueError: If a prompt is malformed, none is short enough, or `out` holds answers of another target or
            other taps.
    """
    tokenizer = load_tokenizer(target)
    origin = origin_of(target, tokenizer) if origin is None else origin
    if shard_paths(out):
        load_examples(out, target_layer_ids, origin)
    longest = size - max(max_new_tokens + 1, PREFILL_CHUNK)
    done, fitting = read_ids(out), read_prompts(prompts, tokenizer, longest)
    if not fitting:
        raise ValueError(f"{prompts} has no prompt of up to {longest} tokens, what {size=} leaves")
    todo = [p for p in fitting if p[0] not in done]
    wanted = {name for name, _, _ in todo}
    responses = [e for e in responses if e.id in wanted]
    known = {e.id for e in responses}
    unanswered = [p for p in todo if p[0] not in known]
    if not todo:
        return
    replayed = with_features(target, responses, target_layer_ids, rows=refill)
    answered = regenerate(
        target, unanswered, target_layer_ids,
        rows=rows, refill=refill, max_new_tokens=max_new_tokens, size=size, sampling=sampling, seed=seed,
    )  # fmt: skip
    answers = itertools.chain(replayed if responses else (), answered if unanswered else ())
    _keep(answers, len(todo), out, target_layer_ids, origin)


def _keep(
    answers: Iterator[Example],
    total: int,
    out: Path,
    target_layer_ids: tuple[int, ...],
    origin: Origin,
) -> None:
    """Writes answers behind the shards that are there, and shows how far it is."""
    index = 1 + max((int(p.stem) for p in shard_paths(out)), default=-1)
    with command.bar("{task.fields[tokens]} tokens") as progress:
        task, tokens = progress.add_task(out.name, total=total, tokens=0), 0
        while shard := list(itertools.islice(answers, EXAMPLES_A_SHARD)):
            write_shard(out, index, shard, target_layer_ids, origin)
            index += 1
            tokens += sum(len(e.tokens) - e.prompt_length for e in shard)
            progress.update(task, advance=len(shard), tokens=tokens)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.regenerate", description=__doc__.split("\n")[0], **command.examples("""
            python -m train.regenerate chats.jsonl answers --temperature 0.7 --seed 1 --rows 32
            python -m train.regenerate prompts.jsonl answers --taps 1,8,14,20,27,29
            python -m train.run train/recipes/smollm2.toml run=runs/answers features=answers
        """),
    )  # fmt: skip
    parser.add_argument("prompts", type=Path, help="JSON lines with text or messages")
    parser.add_argument("out", type=Path, help="folder of shards; an interrupted run goes on")
    parser.add_argument(
        "--target", default=None, help="checkpoint of the target (default: embedded)"
    )
    parser.add_argument(
        "--taps", default="1,8,14,20,27", metavar="IDS", help="target layers whose states are kept"
    )
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--refill", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--size", type=int, default=256, help="cache slots a row")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of sampled answers")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)

    def answer() -> int:
        command.use_compilation_cache()
        taps = parse_taps(args.taps)
        answer_prompts(
            load_target(args.target), args.prompts, args.out, taps,
            rows=args.rows, refill=args.refill, max_new_tokens=args.max_new_tokens, size=args.size,
            sampling=Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p), seed=args.seed,
        )  # fmt: skip
        return 0

    return command.run(answer, "interrupted; the same command goes on")


if __name__ == "__main__":
    raise SystemExit(main())
