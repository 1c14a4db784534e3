"""`dflash-jax generate`."""

import argparse
import json
import sys
import time

from dflash_jax.cli import decoding
from dflash_jax.command import colours
from dflash_jax.generation import stream
from dflash_jax.text import Detokenizer, encode


def run(args: argparse.Namespace) -> int:
    options = decoding.options(args)
    target, draft, tokenizer = decoding.load(args)
    prompt = encode(tokenizer, args.prompt, args.system, args.raw)
    tinted = args.stats and not args.json and draft is not None and colours(sys.stdout)
    heard: list[str] = []
    show = decoding.printer(tinted)

    def write(text: str, drafted: bool) -> None:
        heard.append(text)
        if not args.json:
            show(text, drafted)

    start = time.perf_counter()
    pieces = stream(target, draft, prompt, **options)
    out = decoding.speak(pieces, Detokenizer(tokenizer), target.stop_token_ids, write)
    seconds = time.perf_counter() - start
    if args.json:
        result = {
            "text": "".join(heard),
            "token_ids": out.tokens[0],
            "prompt_tokens": len(prompt),
            "tokens": len(out.tokens[0]),
            "finish": out.finish[0],
            "rounds": out.rounds[0],
            # NaN is no JSON: without a round there is no acceptance length.
            "acceptance_length": out.acceptance_length if out.rounds[0] else None,
            "seconds": seconds,
        }
        print(json.dumps(result))
    else:
        print(flush=True)  # before what stderr says, where both go to one place
    if args.stats:
        decoding.say_stats(out, seconds, tinted)
    return 0
