"""What int8 costs the embedded target, and what it saves: its predictions, drafts, memory, speed and compile time.

    python -m benchmarks.quantized [--prompts 16] [--max-new-tokens 48]

Over held-out prompts and the float32 target's own greedy answers to them. Writes
`benchmarks/results/quantized.json` and prints it.

- compiling: seconds of the processor, and the instructions of the optimised program, of a plain decode loop.
- decoding: tokens/s of whole calls, without a draft and with the embedded one, its acceptance length, and the prompts
  whose text is that of the same target without a draft (all, but in bfloat16), and that of float32.
- predictions: of every target, and of int4 in groups, which is not in the library, fed the same texts: how often the
  likeliest next token is float32's, and the cross-entropy, over the answers and over the prompts.
"""

import argparse
import dataclasses
import functools
import json
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from benchmarks import timing
from dflash_jax import array_typing as at
from dflash_jax import bench, generate
from dflash_jax.adapters import TargetModel, bind
from dflash_jax.cache import KVCache
from dflash_jax.decode import decode
from dflash_jax.generation import Generation
from dflash_jax.pair import Draft, Target, load_draft, load_target, load_tokenizer
from dflash_jax.states import capacity, new_state
from dflash_jax.text import encode

TARGETS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantize": "int8"},
}
BLOCKS = (4, 8)
GROUPS = (32, 64)  # inputs to a scale of the int4 that is tried
CHUNK = 64


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _judged(
    model: TargetModel, params: Any, tokens: at.Tokens, following: Int[Array, " T"], cache: KVCache
) -> tuple[Int[Array, " T"], Float[Array, " T"], KVCache]:
    hidden, _, cache = model.forward(params, tokens, cache)
    logits = model.logits(params, hidden)[:, 0]
    loss = jax.nn.logsumexp(logits, 0) - jnp.take_along_axis(logits, following[None], 0)[0]
    return jnp.argmax(logits, 0), loss, cache.replace(length=cache.length + tokens.shape[1])


def judge(target: Target, text: Sequence[int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest token behind every token of a text but the last, and the nats of the one that follows.

    Args:
        size: Slots of the cache: CHUNK more than the text has tokens, at least.
    """
    models, params = bind(target, None)
    c, count = target.config, len(text) - 1
    cache = KVCache.zeros(
        c.num_hidden_layers, 1, c.num_key_value_heads, size, c.head_dim, target.dtype
    )
    padded = np.zeros(size + 1, np.int32)
    padded[: len(text)] = text
    found = []
    for start in range(0, count, CHUNK):
        piece = padded[start : start + CHUNK + 1]
        likeliest, loss, cache = _judged(models.target, params, piece[None, :-1], piece[1:], cache)
        found.append((likeliest, loss))
    likeliest, loss = (np.concatenate(parts)[:count] for parts in zip(*found))
    return likeliest, loss


def predictions(
    targets: dict[str, Target], prompts: list[list[int]], answers: list[list[int]]
) -> dict[str, Any]:
    """Agreement with float32 and nats a token, of each target over the answers and over the prompts."""
    # The template's own words, which all prompts begin with, are left out.
    shared = next(i for i, tokens in enumerate(zip(*prompts)) if len(set(tokens)) > 1)
    parts: dict[str, list[slice]] = {
        "answers": [slice(len(p) - 1, None) for p in prompts],
        "prompts": [slice(max(shared, 1) - 1, len(p) - 1) for p in prompts],
    }
    texts = [p + a for p, a in zip(prompts, answers)]
    size = capacity(max(map(len, texts)) + CHUNK)
    judged = {
        name: [judge(target, text, size) for text in texts] for name, target in targets.items()
    }
    found: dict[str, Any] = {}
    for part, where in parts.items():
        expected = np.concatenate([l[s] for (l, _), s in zip(judged["float32"], where)])
        found[part] = {"tokens": len(expected)}
        for name, pairs in judged.items():
            likeliest, loss = (
                np.concatenate([pair[i][s] for pair, s in zip(pairs, where)]) for i in (0, 1)
            )
            found[part][name] = {
                "agreement": float(np.mean(likeliest == expected)),
                "cross_entropy": float(np.mean(loss)),
            }
    return found


def in_groups(target: Target, group: int) -> Target:
    """The target with its matrices rounded to symmetric int4 times a scale a group of inputs, as floats.

    What such a format would predict, not what it would hold: the library has none.
    """

    def rounded(weight: jax.Array) -> jax.Array:
        if weight.ndim == 1:
            return weight
        groups = weight.reshape(len(weight), -1, group)
        step = jnp.max(jnp.abs(groups), axis=2, keepdims=True) / 7
        return (jnp.round(groups / jnp.where(step == 0, 1, step)) * step).reshape(weight.shape)

    return dataclasses.replace(target, params=jax.tree.map(rounded, target.params))


def decoded(
    targets: dict[str, Target], drafts: dict[str, Draft], prompts: list[list[int]], count: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """What each target does without a draft and by block size; and float32's texts without one.

    Every prompt alone, all ways of decoding it in turn; what they compile is not counted.
    """
    ways = [(name, block) for name in targets for block in (1, *BLOCKS)]
    seconds, rounds = dict.fromkeys(ways, 0.0), {way: [] for way in ways}
    texts: dict[tuple[str, int], list[list[int]]] = {way: [] for way in ways}

    def call(way: tuple[str, int], prompt: list[int]) -> Generation:
        name, block = way
        draft = drafts[name] if block > 1 else None
        width = block if draft else None
        return generate(targets[name], draft, [prompt], max_new_tokens=count, block_size=width)

    for way in ways:
        call(way, max(prompts, key=len))
    for prompt in prompts:
        for way in ways:
            start = time.perf_counter()
            out = call(way, prompt)
            seconds[way] += time.perf_counter() - start
            texts[way] += out.tokens
            rounds[way] += out.rounds[0]
        ways.append(ways.pop(0))  # another one is first
    return {
        name: {
            str(block) if block > 1 else "plain": {
                "tokens_per_second": sum(map(len, texts[name, block])) / seconds[name, block],
                "acceptance_length": statistics.fmean(rounds[name, block]),
                "equal_to_plain": sum(a == b for a, b in zip(texts[name, block], texts[name, 1])),
                "equal_to_float32": sum(
                    a == b for a, b in zip(texts[name, block], texts["float32", 1])
                ),
            }
            for block in (1, *BLOCKS)
        }
        for name in targets
    }, texts["float32", 1]


def compiling(target: Target) -> dict[str, Any]:
    """What tracing, lowering and compiling the plain decode loop takes, nothing known of it before."""
    jax.clear_caches()
    models, params = bind(target, None)
    state = new_state(target, [[1]], [1], (), 256)
    clocks = [(time.process_time(), time.perf_counter())]
    lowered = decode.lower(models, params, state, np.int32(1))
    clocks.append((time.process_time(), time.perf_counter()))
    program: Any = lowered.compile()
    clocks.append((time.process_time(), time.perf_counter()))
    (cpu0, wall0), (cpu1, _), (cpu2, wall2) = clocks
    memory = program.memory_analysis()
    return {
        "lowering_cpu_seconds": cpu1 - cpu0,
        "compiling_cpu_seconds": cpu2 - cpu1,
        "seconds": wall2 - wall0,
        "instructions": len(re.findall(r"^\s+(?:ROOT )?%\S+ = ", program.as_text(), re.M)),
        "temporary_megabytes": memory.temp_size_in_bytes / 1e6,
    }


def measure(
    targets: dict[str, Target], drafts: dict[str, Draft], prompts: list[list[int]], count: int
) -> dict[str, Any]:
    """All of a result."""
    compiled = {name: compiling(target) for name, target in targets.items()}
    ways, answers = decoded(targets, drafts, prompts, count)
    judges = targets | {f"int4, groups of {n}": in_groups(targets["float32"], n) for n in GROUPS}
    return {
        "prompts": len(prompts),
        "max_new_tokens": count,
        "weights_megabytes": {
            name: sum(x.nbytes for x in jax.tree.leaves(t.params)) / 1e6
            for name, t in targets.items()
        },
        "compiling": compiled,
        "decoding": ways,
        "predictions": predictions(judges, prompts, answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=16, help="of the 48 held-out ones")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()
    targets = {name: load_target(None, **options) for name, options in TARGETS.items()}
    drafts = {name: load_draft(None, t, dtype=t.dtype) for name, t in targets.items()}
    tokenizer = load_tokenizer(targets["float32"])
    texts = bench.read_prompts("held_out")
    chosen = np.linspace(0, len(texts) - 1, args.prompts).round().astype(int)  # of all kinds
    prompts = [encode(tokenizer, texts[i]) for i in chosen]
    result = measure(targets, drafts, prompts, args.max_new_tokens)
    print(json.dumps(result, indent=1))
    print(timing.write("quantized", result))


if __name__ == "__main__":
    main()
