"""The command line: `dflash-jax generate | bench | inspect`. Results on stdout, progress on stderr."""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from dflash_jax.sampling import VERIFY, Sampling

if TYPE_CHECKING:
    from dflash_jax.generation import Generation
    from dflash_jax.text import Detokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0 on success, 1 with one line on stderr for a user's mistake."""
    args = _parser().parse_args(argv)
    _use_compilation_cache()
    # transformers would say on every start that torch is missing; here it only reads tokenizers.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        return args.command(args)
    except (ValueError, FloatingPointError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _use_compilation_cache() -> None:
    """Keeps compiled programs between runs, where jax is not told another place."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "dflash-jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash-jax", description="DFlash speculative decoding in JAX."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    pair = _pair_options()
    generate = commands.add_parser("generate", parents=[pair], help="answer a prompt")
    generate.add_argument("prompt", metavar="PROMPT")
    generate.add_argument(
        "--raw", action="store_true", help="the prompt as it is, without the chat template"
    )
    generate.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    generate.add_argument("--stats", action="store_true", help="acceptance and speed, on stderr")
    generate.set_defaults(command=_generate)

    bench = commands.add_parser(
        "bench",
        parents=[pair],
        help="measure plain decoding against DFlash, and acceptance by context length",
    )
    bench.add_argument(
        "--prompts",
        default="held_out",
        metavar="SET",
        help="held_out, humaneval, gsm8k, mtbench, or a JSON-lines file (default: held_out)",
    )
    bench.add_argument("--limit", type=int, metavar="N", help="the first N prompts only")
    bench.set_defaults(command=_bench)

    inspect = commands.add_parser(
        "inspect", help="what a checkpoint is, and everything wrong with it; status 1 for an error"
    )
    inspect.add_argument("ref", metavar="REF", help="hub id, folder, Orbax folder or GGUF file")
    inspect.add_argument("--target", metavar="REF", help="judge a draft as this target's")
    inspect.add_argument("--json", action="store_true", help="one JSON object on stdout")
    inspect.set_defaults(command=_inspect)
    return parser


def _pair_options() -> argparse.ArgumentParser:
    """Options of every command that decodes."""
    pair = argparse.ArgumentParser(add_help=False)
    pair.add_argument(
        "--target",
        metavar="REF",
        help="hub id, folder, Orbax folder or GGUF file (default: the embedded SmolLM2-135M-Instruct)",
    )
    pair.add_argument(
        "--draft",
        metavar="REF",
        help="hub id or folder; lookup to draft from the text itself; none for plain decoding "
        "(default: the embedded draft)",
    )
    pair.add_argument(
        "--lookup",
        action="store_true",
        help="where the text's last tokens recur in it, propose what followed instead of the draft's",
    )
    pair.add_argument(
        "--adapt-width",
        action="store_true",
        help="let the target read fewer slots of a block while few are accepted",
    )
    pair.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    pair.add_argument(
        "--block-size",
        type=int,
        metavar="Q",
        help="the anchor and Q - 1 proposals (default: the draft's)",
    )
    pair.add_argument(
        "--target-layer-ids",
        metavar="IDS",
        help='taps of a draft whose config lacks them: "1,9,17" or "default"',
    )
    pair.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="default: float32 on the CPU, else bfloat16",
    )
    pair.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy"
    )
    pair.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps all ids")
    pair.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 keeps all ids")
    pair.add_argument("--seed", type=int, default=0, metavar="S")
    pair.add_argument(
        "--verify", choices=VERIFY, default="coupled", help="how proposals are judged (coupled)"
    )
    pair.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return pair


def _load(args: argparse.Namespace):
    from dflash_jax.pair import load_draft, load_target

    target = load_target(args.target, dtype=args.dtype)
    if args.draft in ("none", "lookup"):
        return target, None if args.draft == "none" else "lookup"
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
    return target, load_draft(args.draft, target, target_layer_ids=ids, dtype=args.dtype)


def encode(tokenizer: Any, prompt: str, system: str | None = None, raw: bool = False) -> list[int]:
    """Token ids of a prompt, through the chat template unless raw.

    Raises:
        ValueError: If the tokenizer has no template.
    """
    if raw:
        return tokenizer.encode(prompt)
    if tokenizer.chat_template is None:
        raise ValueError("the target's tokenizer has no chat template; use --raw")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def _sampling(args: argparse.Namespace) -> Sampling:
    return Sampling(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, verify=args.verify
    )


def _generate(args: argparse.Namespace) -> int:
    from dflash_jax.generation import stream
    from dflash_jax.pair import load_tokenizer
    from dflash_jax.text import Detokenizer

    sampling = _sampling(args)
    target, draft = _load(args)
    tokenizer: Any = load_tokenizer(target)
    prompt = encode(tokenizer, args.prompt, args.system, args.raw)
    start = time.perf_counter()
    pieces = stream(
        target, draft, prompt, max_new_tokens=args.max_new_tokens, block_size=args.block_size,
        sampling=sampling, key=jax.random.key(args.seed), lookup=args.lookup,
        adapt_width=args.adapt_width,
    )  # fmt: skip
    out, text = _speak(pieces, Detokenizer(tokenizer), target.stop_token_ids, aloud=not args.json)
    seconds = time.perf_counter() - start
    tokens, finish = out.tokens[0], out.finish[0]
    if args.json:
        result = {
            "text": text,
            "token_ids": tokens,
            "prompt_tokens": len(prompt),
            "tokens": len(tokens),
            "finish": finish,
            "rounds": out.rounds[0],
            # NaN is no JSON: without a round there is no acceptance length.
            "acceptance_length": out.acceptance_length if out.rounds[0] else None,
            "seconds": seconds,
        }
        print(json.dumps(result))
    else:
        print()
    if args.stats:
        print(
            f"{len(tokens)} tokens in {seconds:.2f} s with compilation, {len(out.rounds[0])} rounds, "
            f"acceptance length {out.acceptance_length:.2f}, ended by {finish}",
            file=sys.stderr,
        )
    return 0


def _speak(
    pieces: Iterator[list[int]], words: "Detokenizer", stops: Sequence[int], aloud: bool
) -> tuple["Generation", str]:
    """Prints a stream's text as it comes; returns what the stream returns, and the text."""
    text, out = "", None
    while out is None:
        try:
            # A stop id, always the last token, ends the text and is none of it.
            new = words.push([t for t in next(pieces) if t not in stops])
        except StopIteration as end:
            out, new = end.value, words.finish()
        text += new
        if aloud:
            print(new, end="", flush=True)
    return out, text


def _bench(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from dflash_jax import bench
    from dflash_jax.pair import load_tokenizer

    sampling = _sampling(args)
    texts = bench.read_prompts(args.prompts, args.limit)
    target, draft = _load(args)
    if draft is None:
        raise ValueError(
            "bench compares plain decoding with a draft; --draft none leaves nothing to compare"
        )
    tokenizer: Any = load_tokenizer(target)
    prompts = [encode(tokenizer, text) for text in texts]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("decoding", total=len(prompts))
        report = bench.run(
            target, draft, prompts, max_new_tokens=args.max_new_tokens, block_size=args.block_size,
            sampling=sampling, key=jax.random.key(args.seed), lookup=args.lookup,
            adapt_width=args.adapt_width, progress=lambda done: progress.update(task, completed=done),
        )  # fmt: skip
    print(
        json.dumps(dataclasses.asdict(report)) if args.json else bench.table(report, args.prompts)
    )
    # Rejection draws other texts than plain decoding, of the same distribution.
    may_differ = sampling.temperature > 0 and sampling.verify != "coupled"
    return 0 if may_differ or report.equal == report.prompts else 1


def _inspect(args: argparse.Namespace) -> int:
    from dflash_jax.checkpoint.inspect import inspect
    from dflash_jax.checkpoint.inspect.render import render

    jax.config.update("jax_platforms", "cpu")  # nothing is computed
    report = inspect(args.ref, args.target)
    if args.json:
        print(json.dumps({**dataclasses.asdict(report), "sound": report.sound}))
    else:
        render(report)
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())
