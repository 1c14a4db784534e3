"""What a round costs: against its parts, and against what should not matter.

    python -m benchmarks.decoding [--rounds 9] [--dtype float32] [--only SECTION ...]

On the embedded target, with a draft of three layers of its shape and random weights: nothing in a round's cost
depends on them, and what is accepted is dictated. All calls of a section alternate in one process; times are medians.
Writes `benchmarks/results/decoding.json` and prints it.

- parts: a plain step, the target's forward over 4, 8 and 16 tokens, the draft's over a block, with the whole
  vocabulary and 8,192 ids of it, and what reading the weights and attention take of a
  step.
- accepted: tokens/s over plain decoding's where all proposals are right (oracle) and where none is (hopeless).
- flat: a round against the tokens asked for, the used length and the rows.
- calls: `stream` against `generate`.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from dflash_jax import bench, generate, stream
from dflash_jax.adapters import bind
from dflash_jax.cache import read_rows
from dflash_jax.config import DraftConfig, RopeConfig
from dflash_jax.decode import DraftFns, Models, State, prefill
from dflash_jax.jobs import make_job
from dflash_jax.ops.product import product
from dflash_jax.pair import Draft, Target, load_target
from dflash_jax.sampling import Picker, Proposals, Sampling
from dflash_jax.states import PREFILL_CHUNK, capacity, new_draft_cache, new_state
from train.vocabulary import offsets
from train.warm_start import random_params

USED, BLOCK, REDUCED, LAYERS = 256, 8, 8192, 3
# The first comes from reading the prompt; the others are whole blocks of 8 and of 16.
ORACLE_TOKENS = 97


def random_draft(target: Target, block_size: int, vocabulary: int | None = None) -> Draft:
    """A plain draft of the target's shape with random weights, in the target's dtype."""
    c = target.config
    config = DraftConfig(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=LAYERS,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim,
        vocab_size=c.vocab_size, max_position_embeddings=c.max_position_embeddings, rms_norm_eps=1e-6,
        rope=RopeConfig(theta=c.rope.theta), qk_norm=True, block_size=block_size, mask_token_id=16,
        target_layer_ids=(1, 8, 14, 20, 27), num_target_layers=c.num_hidden_layers, draft_vocab_size=vocabulary,
    )  # fmt: skip
    dtype = jax.tree.leaves(target.params)[0].dtype
    params = jax.tree.map(lambda x: x.astype(dtype), random_params(config, jax.random.key(0)))
    if vocabulary is not None:
        params["d2t"] = jnp.asarray(offsets(np.arange(vocabulary)))
    return Draft(config, params, Path("random"))


@dataclasses.dataclass(frozen=True)
class Dictated:
    """`decode.DraftFns` that does a draft's work and then proposes `params["script"]`, where it holds no -1."""

    own: DraftFns

    def extend(self, params: Any, context: Any, cache: Any) -> Any:
        return self.own.extend(params, context, cache)

    def propose(
        self, params: Any, text: Any, cache: Any, block_size: int, pick: Picker
    ) -> tuple[Proposals, Any]:
        drafted, cache = self.own.propose(params, text, cache, block_size, pick)
        said = read_rows(params["script"], pick.anchor + 1, block_size - 1)
        tokens = jnp.where(said >= 0, said, drafted.tokens)
        return drafted._replace(tokens=tokens), cache


def at_length(target: Target, draft: Draft | None, used: int, size: int, rows: int = 1) -> State:
    """A state whose rows stand behind `used` tokens, of a cache with `size` slots."""
    state = new_state(target, [[1] * used] * rows, [size - used] * rows, (), size)
    length = jnp.full((rows,), used - 1, jnp.int32)
    state = state.replace(target=state.target.replace(length=length))
    if draft is not None:
        cache = new_draft_cache(draft, rows, size)
        state = state.replace(draft=cache.replace(length=length + 0))
    return jax.tree.map(jnp.copy, state)


def parts(target: Target, rounds: int) -> dict[str, Any]:
    """A plain step, forwards over blocks, the draft's, and what weights and attention take of a step."""
    size = capacity(USED + 32)
    models, params = bind(target, None)
    ways = {"plain": bench.rounds(models, params, at_length(target, None, USED, size))}
    ways["plain, half the slots"] = bench.rounds(
        models, params, at_length(target, None, size // 4, size // 2)
    )
    for width in (4, 8, 16):
        wide = dataclasses.replace(models, block_size=width)
        step = bench.verifying(wide, at_length(target, None, USED, size))
        ways[f"verify({width})"] = bench.repeated(step, params)
    for block_size in (BLOCK, 2 * BLOCK):
        for vocabulary in (None, REDUCED):
            draft = random_draft(target, block_size, vocabulary)
            name = f"draft({block_size})" + (f", {vocabulary} ids" if vocabulary else "")
            drafted, both = bind(target, draft)
            step = bench.drafting(drafted, both, at_length(target, draft, USED, size))
            ways[name] = bench.repeated(step, both)
    head = target.params["embed_tokens"]["weight"]
    ways["head"] = bench.repeated((_mixed, jnp.ones((head.shape[1], 1, 1), head.dtype)), head)
    seconds = {name: s / bench.LOOP for name, s in timing.alternate(ways, rounds).items()}
    plain, head_alone = seconds["plain"], seconds["head"]
    # A step's time is affine in the slots.
    attended = 2 * (plain - seconds["plain, half the slots"])
    weights = sum(x.size for x in jax.tree.leaves(target.params))
    floor = head_alone * weights / head.size + attended
    return {
        "milliseconds": {name: 1e3 * value for name, value in seconds.items()},
        "over_plain": {name: value / plain for name, value in seconds.items() if name != "plain"},
        "attention_milliseconds": 1e3 * attended,
        "gigabytes_per_second": head.nbytes / head_alone / 1e9,
        "plain_over_weights_and_attention": plain / floor,
    }


def _mixed(head: Any, x: Any) -> Any:
    """A product with the head, and a next input that depends on all of it."""
    return (x + 1e-6 * product(head, x).mean()).astype(x.dtype)


def accepted(target: Target, rounds: int) -> dict[str, Any]:
    """Tokens/s over plain decoding's, all proposals right and none, without prefill; and what a round is made of.

    `share_of_ideal` is the oracle's speed over that of rounds which are nothing but the target's and the draft's
    forwards, called in the same turns.
    """
    count = ORACLE_TOKENS
    size = capacity(USED + count + 16)
    prompt = np.random.default_rng(0).integers(20, 20_000, USED).tolist()
    out = generate(target, None, [prompt], max_new_tokens=count + 16, stop_token_ids=())
    text = np.full((1, size), -1, np.int32)
    text[0, : USED + count + 16] = prompt + out.tokens[0]
    wrong = np.where(text >= 0, (text + 1) % 20_000, -1)
    ways: dict[str, Callable[[], Any]] = {
        "plain": _whole(target, None, *bind(target, None), prompt, text, count)
    }
    for block_size in (8, 16):
        draft = random_draft(target, block_size)
        state = at_length(target, draft, USED, size)
        for name, script in (("oracle", text), ("hopeless", wrong)):
            for adapt in (False, True):
                models, params = bind(target, draft, adapt_width=adapt)
                assert models.draft is not None
                models = dataclasses.replace(models, draft=Dictated(models.draft))
                params = params | {"script": jnp.asarray(script)}
                label = f"{name}, block {block_size}" + (", adapt_width" if adapt else "")
                ways[label] = _whole(target, draft, models, params, prompt, text, count)
        models, params = bind(target, draft)
        ways[f"verify({block_size})"] = bench.repeated(bench.verifying(models, state), params)
        ways[f"draft({block_size})"] = bench.repeated(bench.drafting(models, params, state), params)
    seconds = timing.alternate(ways, max(5, rounds // 2))
    plain = seconds.pop("plain")
    return {
        "plain_tokens_per_second": (count - 1) / plain,
        "over_plain": {k: plain / v for k, v in seconds.items() if "block" in k},
        "share_of_ideal": {Q: share_of_ideal(seconds, Q) for Q in (8, 16)},
    }


def share_of_ideal(seconds: Mapping[str, float], block_size: int) -> float:
    """The oracle's tokens/s over those of rounds that are nothing but their parts."""
    parts = (seconds[f"verify({block_size})"] + seconds[f"draft({block_size})"]) / bench.LOOP
    rounds = (ORACLE_TOKENS - 1) / block_size
    return rounds * parts / seconds[f"oracle, block {block_size}"]


def _whole(
    target: Target, draft: Draft | None, models: Models, params: Any, prompt: list[int], text: np.ndarray, count: int
) -> Callable[[], Any]:  # fmt: skip
    """Decodes `count` tokens behind a prompt that was read before, in one call."""
    state = new_state(target, [prompt], [count], (), text.shape[1])
    if draft is not None:
        state = state.replace(draft=new_draft_cache(draft, 1, text.shape[1]))
    state = jax.tree.map(jnp.copy, state)
    ready = prefill(models.target, models.draft, params, state, chunk=PREFILL_CHUNK)
    call, end = bench.rounds(models, params, ready, most=10_000), len(prompt) + count
    np.testing.assert_array_equal(np.asarray(call())[0, :end], text[0, :end])
    return call


def flat(target: Target, rounds: int) -> dict[str, Any]:
    """Milliseconds of a round against the tokens asked for, the used length and the rows."""
    draft = random_draft(target, BLOCK)
    models, params = bind(target, draft)

    def asked(count: int) -> Callable[[], Any]:
        """The first rounds of a call for `count` tokens, in the bucket that it starts in."""
        options: Any = dict(stop_token_ids=(), sampling=Sampling(), key=None)
        job = make_job(target, draft, [[1] * (USED - 1)], count, **options)
        return bench.rounds(models, params, jax.tree.map(jnp.copy, job.start([0])))

    def used(length: int, rows: int = 1) -> Callable[[], Any]:
        size = capacity(length + (bench.LOOP + 1) * BLOCK)
        return bench.rounds(models, params, at_length(target, draft, length, size, rows))

    counts, lengths, rows = (256, 768, 1792, 3840, 7936), (100, 360, 872, 1896, 3944), (1, 2, 4, 8)
    found = timing.alternate(
        {f"asked {n}": asked(n) for n in counts}
        | {f"used {n}": used(n) for n in lengths}
        | {f"rows {n}": used(USED, n) for n in rows},
        rounds,
    )
    ms = {name: 1e3 * value / bench.LOOP for name, value in found.items()}
    by = {kind: {int(k.split()[1]): v for k, v in ms.items() if k.startswith(kind)} for kind in ("asked", "used", "rows")}  # fmt: skip
    x, y = np.array(list(by["used"].items())).T
    slots = np.array([capacity(int(n) + (bench.LOOP + 1) * BLOCK) for n in x])
    slope, base = np.polyfit(slots, y, 1)
    return {
        "milliseconds_by_tokens_asked": by["asked"],
        "slowest_over_fastest": max(by["asked"].values()) / min(by["asked"].values()),
        "milliseconds_by_used_length": by["used"],
        "affine_fit": {"base": base, "per_1024_slots": 1024 * slope, "largest_residual": float(np.abs(slots * slope + base - y).max())},
        "milliseconds_by_rows": by["rows"],
    }  # fmt: skip


def calls(target: Target, rounds: int) -> dict[str, Any]:
    """`stream`, 8 rounds a piece and one, over `generate` of the same tokens."""
    draft, prompt = random_draft(target, BLOCK), list(range(100, 164))
    options: dict[str, Any] = dict(max_new_tokens=96, stop_token_ids=())

    def streamed(each: int) -> Any:
        return sum(len(p) for p in stream(target, draft, prompt, rounds=each, **options))

    ways: dict[str, Callable[[], Any]] = {
        "generate": lambda: len(generate(target, draft, [prompt], **options).tokens[0]),
        "stream, 8 rounds a piece": lambda: streamed(8),
        "stream, 1 round a piece": lambda: streamed(1),
    }
    seconds = timing.alternate(ways, rounds)
    whole = seconds["generate"]
    return {"over_generate": {k: v / whole for k, v in seconds.items() if k != "generate"}}


SECTIONS: Mapping[str, Callable[[Target, int], dict[str, Any]]] = {
    "parts": parts, "accepted": accepted, "flat": flat, "calls": calls,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="counted calls of each way")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    args = parser.parse_args()
    target = load_target(dtype=args.dtype)
    result = {name: SECTIONS[name](target, args.rounds) for name in args.only}
    print(json.dumps(result, indent=1))
    if args.only == list(SECTIONS):
        print(timing.write("decoding", result))


if __name__ == "__main__":
    main()
