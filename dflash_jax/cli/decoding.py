"""What the commands that decode share: the pair that the options name, and text as it is spoken."""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from dflash_jax import command
from dflash_jax.checkpoint import hf
from dflash_jax.generation import Generation
from dflash_jax.pair import Target, load_draft, load_target, load_tokenizer
from dflash_jax.sampling import Sampling
from dflash_jax.text import Detokenizer

Write = Callable[[str, bool], None]  # text, and whether it was drafted
_DRAFTED, _PLAIN = "\x1b[32m", "\x1b[39m"


def load(args: argparse.Namespace) -> tuple[Target, Any, Any]:
    """The target, the draft, and the target's tokenizer.

    Raises:
        ValueError: As `pair.load_target` and `pair.load_draft` do.
    """
    command.use_compilation_cache()
    if args.draft is None and args.target is not None:
        raise ValueError("--target needs a --draft that was trained for it, or --draft none")
    ids = args.target_layer_ids
    if ids is not None and ids != "default":
        try:
            ids = tuple(int(i) for i in ids.split(","))
        except ValueError:
            raise ValueError(
                f"--target-layer-ids {ids!r} is neither ids with commas nor default"
            ) from None
    draft = {"none": None, "lookup": "lookup"}.get(args.draft, "")
    # Before anything is read or drawn: downloads have bars of their own.
    source = None if args.target is None else hf.resolve(args.target)
    source_of_draft = None if draft != "" or args.draft is None else hf.resolve(args.draft)
    with ThreadPoolExecutor(1) as pool:
        # The tokenizer's library, while weights are read: a twentieth of a start.
        pool.submit(importlib.import_module, "transformers")
        with command.working(f"loading the target {args.target or '(embedded)'}") as progress:
            target = load_target(
                source, dtype=args.dtype, quantize=args.quantize, progress=progress
            )
    if draft == "":
        with command.working(f"loading the draft {args.draft or '(embedded)'}") as progress:
            draft = load_draft(
                source_of_draft, target, target_layer_ids=ids, dtype=args.dtype, progress=progress
            )
    return target, draft, load_tokenizer(target)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What the options say for `generate`, `stream` and `bench.run`.

    Raises:
        ValueError: If the sampling is out of bounds.
    """
    return {
        "max_new_tokens": args.max_new_tokens,
        "block_size": args.block_size,
        "sampling": Sampling(
            temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, verify=args.verify
        ),
        "key": jax.random.key(args.seed),
        "lookup": args.lookup,
        "adapt_width": args.adapt_width,
    }


def speak(
    pieces: Iterator[list[int]], words: Detokenizer, stops: Sequence[int], write: Write
) -> Generation:
    """Writes a stream's text as it comes; returns what the stream returns.

    Of a round's tokens the last counts as the target's own, and those before it as drafted.
    """
    waiting = command.working("compiling (kept for the next time), and reading the prompt")
    while True:
        try:
            with waiting:
                piece = next(pieces)
        except StopIteration as end:
            write(words.finish(), False)
            return end.value
        waiting = contextlib.nullcontext()
        # A stop id, always the last token, ends the text and is none of it.
        write(words.push(piece[:-1]), True)
        write(words.push([t for t in piece[-1:] if t not in stops]), False)


def printer(tinted: bool) -> Write:
    """Prints text on stdout; drafted text in green if tinted."""

    def write(text: str, drafted: bool) -> None:
        if text:
            print(f"{_DRAFTED}{text}{_PLAIN}" if tinted and drafted else text, end="", flush=True)

    return write


def say_stats(out: Generation, seconds: float, tinted: bool) -> None:
    """A line on stderr about an answer."""
    (tokens,), (rounds,), (finish,) = out.tokens, out.rounds, out.finish
    drafted = sum(rounds) - len(rounds)
    print(
        f"{len(tokens)} tokens in {seconds:.2f} s with compilation, {len(rounds)} rounds, acceptance length "
        f"{out.acceptance_length:.2f}, ended by {finish}"
        + (f"; {_DRAFTED}green{_PLAIN}: drafted and accepted, {drafted} tokens" if tinted else ""),
        file=sys.stderr,
    )
