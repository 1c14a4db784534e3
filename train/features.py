"""The target's taps of given texts: computed into a store ahead of training, or as a step asks for them.

    python -m train.features DATA... OUT --target REF --taps 1,8,14,20,27

DATA are files as in `chat.read_documents`; OUT is a folder in the layout of `store.py`. An interrupted
run goes on where it stopped and ends with the same files.
"""

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt16

from dflash_jax import array_typing as at
from dflash_jax import command
from dflash_jax.adapters import TargetModel
from dflash_jax.cache import resize, write_rows
from dflash_jax.checkpoint import keys
from dflash_jax.decode import State, prefill
from dflash_jax.models.transformer import Transformer
from dflash_jax.pair import Target, load_target, load_tokenizer
from dflash_jax.sampling import Picker, Proposals
from dflash_jax.sharding import gathered
from dflash_jax.states import PREFILL_CHUNK, new_state
from train.chat import read_files
from train.store import Example, Lazy, Origin, load_examples, read_ids, shard_paths, write_shard

EXAMPLES_A_SHARD = 128


class Features(struct.PyTreeNode):
    """A draft's cache that keeps the raw taps. `values` is `[B, S, C * D]`, the bits of bfloat16."""

    values: UInt16[Array, "B S CD"]
    length: at.Rows

    def resize(self, size: int) -> "Features":
        return self.replace(values=resize(self.values, size, axis=1))


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


def recorded(target: Target, state: State, target_layer_ids: tuple[int, ...]) -> State:
    """A fresh state after prefill, with the taps of all its tokens but the last in `draft`.

    Args:
        target: The model.
        state: Donated; needs `PREFILL_CHUNK` free slots behind every row.
        target_layer_ids: Taps.
    """
    rows, size = state.tokens.shape
    width = len(target_layer_ids) * target.config.hidden_size
    features = Features(jnp.zeros((rows, size, width), jnp.uint16), jnp.zeros((rows,), jnp.int32))
    return prefill(
        TargetModel(Transformer(target.config, target_layer_ids)), Recorder(), {"target": target.params},
        state.replace(draft=features), chunk=PREFILL_CHUNK,
    )  # fmt: skip


def taps_of(
    target: Target,
    texts: Sequence[Sequence[int]],
    target_layer_ids: tuple[int, ...],
    size: int,
) -> UInt16[Array, "B S CD"]:
    """The bits of the bfloat16 taps of texts of up to `size` tokens; garbage from the last token on.

    Raises:
        ValueError: If a text is empty or longer, or a tap is no layer.
    """
    check_taps(target, target_layer_ids)
    for i, text in enumerate(texts):
        if not 0 < len(text) <= size:
            raise ValueError(f"text {i} has {len(text)} tokens, not 1 to {size=}")
    state = new_state(target, texts, [0] * len(texts), (), size + PREFILL_CHUNK)
    return recorded(target, state, target_layer_ids).draft.values


def check_taps(target: Target, target_layer_ids: Sequence[int]) -> None:
    """Raises ValueError for taps that are no layers of the target."""
    outside = [i for i in target_layer_ids if not 0 <= i < target.config.num_hidden_layers]
    if outside:
        raise ValueError(f"taps {outside} are not in [0, {target.config.num_hidden_layers})")


def with_features(
    target: Target, examples: Sequence[Example], target_layer_ids: tuple[int, ...], *, rows: int
) -> Iterator[Example]:
    """Yields examples with their features, computed `rows` at a time: nothing is decoded.

    Raises:
        ValueError: If an example is empty, or a tap is no layer.
    """
    for start in range(0, len(examples), rows):
        chosen = examples[start : start + rows]
        size = max(PREFILL_CHUNK, 1 << (max(len(e.tokens) for e in chosen) - 1).bit_length())
        texts = [
            *(e.tokens.tolist() for e in chosen),
            *[[0]] * (rows - len(chosen)),
        ]  # one compilation
        values = np.asarray(taps_of(target, texts, target_layer_ids, size))
        for row, example in zip(values, chosen):
            features = row[: len(example.tokens)].copy().view(ml_dtypes.bfloat16)
            features[-1] = 0
            yield dataclasses.replace(example, features=features)


# As a step asks for them.


def as_needed(
    target: Target, examples: Sequence[Example], target_layer_ids: tuple[int, ...]
) -> list[Example]:
    """Examples whose features the target computes whenever they are looked at."""
    width = len(target_layer_ids) * target.config.hidden_size

    def read(example: Example) -> np.ndarray:
        (found,) = with_features(target, [example], target_layer_ids, rows=1)
        return np.asarray(found.features)

    return [
        dataclasses.replace(e, features=Lazy((len(e.tokens), width), functools.partial(read, e)))
        for e in examples
    ]


def online_features(
    target: Target,
    rows: Sequence[Sequence[Example]],
    target_layer_ids: tuple[int, ...],
    size: int,
) -> Float[Array, "B S CD"]:
    """`data.stack_features` by the target, on the device; each example is read alone.

    Args:
        target: The model.
        rows: Examples; longer ones are cut.
        target_layer_ids: Taps.
        size: S.
    """
    B, width = len(rows), len(target_layer_ids) * target.config.hidden_size
    out = jnp.zeros((B, size, width), jnp.bfloat16)
    texts = [e.tokens[:size].tolist() for row in rows for e in row]
    text, column = np.full((B, size), -1, np.int32), np.zeros((B, size), np.int32)
    places = iter(range(len(texts)))
    for b, row in enumerate(rows):
        begin = 0
        for i in itertools.islice(places, len(row)):
            end = begin + len(texts[i]) - 1  # the target never read the last token
            text[b, begin:end], column[b, begin:end] = i, np.arange(end - begin)
            begin = end + 1
    # As many texts at a time as there are rows: one program, however many a row holds.
    for start in range(0, len(texts), B):
        part = texts[start : start + B]
        values = taps_of(target, [*part, *[[0]] * (B - len(part))], target_layer_ids, size)
        out = _place(out, values, text - start, column)
    return out


@functools.partial(jax.jit, donate_argnames=("out",))
def _place(
    out: Float[Array, "B S CD"],
    values: UInt16[Array, "B S2 CD"],
    text: Int[Array, "B S"],
    column: Int[Array, "B S"],
) -> Float[Array, "B S CD"]:
    """Puts `values[text, column]` where `text` is one of theirs."""
    inside: Bool[Array, "B S"] = (text >= 0) & (text < len(values))
    taken = values[jnp.where(inside, text, 0), column]
    return jnp.where(inside[:, :, None], jax.lax.bitcast_convert_type(taken, jnp.bfloat16), out)


# Into a store.


def target_hash(target: Target) -> str:
    """sha256 of the weights, rounded to bfloat16, and of what RoPE does with them.

    The same for a checkpoint in every format, loaded in every dtype. All processes must call it where
    the weights lie on several.
    """
    rope = target.config.rope
    scaling = {f.name: getattr(rope, f.name) for f in dataclasses.fields(rope)}
    stated = {f.name: scaling[f.name] for f in dataclasses.fields(rope) if scaling[f.name] != f.default}  # fmt: skip
    digest = hashlib.sha256(repr(sorted(stated.items())).encode())
    for path, leaf in sorted(keys.flatten(target.params).items()):
        digest.update(f"{path} {leaf.shape}".encode())
        digest.update(np.asarray(gathered(leaf.astype(jnp.bfloat16))).tobytes())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of the vocabulary: which text each id stands for."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def origin_of(target: Target, tokenizer: Any) -> Origin:
    """What a store says of features that this target computes."""
    return Origin(target_hash(target), tokenizer_hash(tokenizer))


def write_features(
    target: Target,
    origin: Origin,
    examples: Sequence[Example],
    folder: Path,
    target_layer_ids: tuple[int, ...],
    *,
    rows: int,
) -> None:
    """Writes the store of the examples' features, as far as it is not there yet.

    Raises:
        ValueError: If the folder holds other examples, or those of another target or other taps.
    """
    check_taps(target, target_layer_ids)
    shards = [examples[i : i + EXAMPLES_A_SHARD] for i in range(0, len(examples), EXAMPLES_A_SHARD)]
    done = shard_paths(folder)
    if done:
        stored = load_examples(folder, target_layer_ids, origin)
        kept = all(
            a.id == b.id and np.array_equal(a.tokens, b.tokens) and np.array_equal(a.supervised, b.supervised)
            for a, b in zip(stored, examples)
        )  # fmt: skip
        if not kept or len(stored) > len(examples):
            raise ValueError(f"{folder} holds the features of other examples; name another folder")
    with command.bar() as progress:
        task = progress.add_task(folder.name, total=len(examples), completed=len(read_ids(folder)))
        for index, shard in enumerate(shards):
            if index >= len(done):
                found = list(with_features(target, shard, target_layer_ids, rows=rows))
                write_shard(folder, index, found, target_layer_ids, origin)
                progress.update(task, advance=len(shard))


def parse_taps(text: str) -> tuple[int, ...]:
    """The target layers that the option --taps names.

    Raises:
        ValueError: Unless they are numbers with commas.
    """
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise ValueError(f"--taps {text!r} must be layers with commas, like 1,9,17")
    return tuple(int(part) for part in text.split(","))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.features", description=__doc__.split("\n")[0], **command.examples("""
            python -m train.features chats.jsonl notes.txt features --max-length 512 --too-long cut
            python -m train.features chats.jsonl features --taps 1,8,14,20,27,29
            python -m train.run train/recipes/smollm2.toml run=runs/chats features=features
        """),
    )  # fmt: skip
    parser.add_argument("data", nargs="+", type=Path, help="JSON lines, or .txt with a text a line")
    parser.add_argument("out", type=Path, help="folder of the store; an interrupted run goes on")
    parser.add_argument("--target", help="checkpoint of the target (default: embedded)")
    parser.add_argument("--taps", default="1,8,14,20,27", metavar="IDS", help="target layers, most often the draft's and the last")  # fmt: skip
    parser.add_argument("--max-length", type=int, default=2048, help="most tokens of a document")
    parser.add_argument("--too-long", choices=("drop", "cut"), default="drop")
    parser.add_argument("--thinking", choices=("keep", "strip"), default="keep")
    parser.add_argument("--turns", choices=("all", "last"), default="all")
    parser.add_argument("--rows", type=int, default=8, help="documents at a time")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)

    def write() -> int:
        command.use_compilation_cache()
        taps = parse_taps(args.taps)
        target = load_target(args.target)
        check_taps(target, taps)
        tokenizer = load_tokenizer(target)
        documents, _ = read_files(
            args.data, tokenizer, args.max_length,
            too_long=args.too_long, thinking=args.thinking, turns=args.turns,
        )  # fmt: skip
        origin = origin_of(target, tokenizer)
        write_features(target, origin, documents, args.out, taps, rows=args.rows)
        return 0

    return command.run(write, "interrupted; the same command goes on")


if __name__ == "__main__":
    raise SystemExit(main())
