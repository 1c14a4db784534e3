"""What a round and a training step cost on an accelerator, against what its memory and products allow.

    python -m benchmarks.accelerator [--only qwen3-8b qwen3-4b training] [--rounds 5] [--tiny]

Random bfloat16 weights of the shapes of Qwen3-8B, Qwen3-4B and z-lab's drafts for them (5 layers, blocks of 16),
made on the device: nothing in a round's cost depends on them, and what is accepted is dictated. Each way is a loop in
one compiled program, so that dispatch counts once a call; all ways of a model alternate, and times are medians of at
least five calls. Writes `benchmarks/results/accelerator.json` and prints a table with the bars; those in tokens/s are
an H200's. `--tiny` runs all of it at sizes for a CPU, which measure nothing, and writes nothing.

- device: what one reads in a copy and in a matrix-vector product, and computes in a square product.
- each model: plain decoding against reading its weights and cache once a token at that bandwidth; the target's
  forward over 16 tokens and the draft's part of a round, over a plain step; tokens/s where 6.5 tokens a round are
  accepted, of one row and of 8.
- training: one step of the 8B's draft, against the device's peak.
"""

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import timing
from benchmarks.decoding import Dictated, at_length
from dflash_jax.adapters import bind
from dflash_jax.cache import write_rows
from dflash_jax.checkpoint import keys
from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig, build_target_layer_ids
from dflash_jax.decode import RUNNING, Models, State, decode
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.pair import Draft, Target
from dflash_jax.sampling import Picker, argmax
from dflash_jax.states import capacity
from train.objective import Objective
from train.step import Blocks, TrainState, make_blocks, train_step
from train.warm_start import random_params

TAU, BLOCK = 6.5, 16
# Per cent of z-lab's rounds that committed 1, 2, .. 16 tokens (github.com/z-lab/dflash/issues/166).
COMMITTED = (11.2, 16.4, 12.0, 8.7, 6.9, 6.2, 5.5, 4.3, 4.8, 2.5, 3.7, 2.3, 2.5, 2.5, 2.0, 8.4)

# Bytes/s of memory and bfloat16 FLOP/s without sparsity, by what JAX calls the device; the vendors' figures.
DATA_SHEETS = {
    "NVIDIA A100-SXM4-80GB": (2.04e12, 312e12), "NVIDIA H100 80GB HBM3": (3.35e12, 989e12),
    "NVIDIA H200": (4.8e12, 989e12), "NVIDIA B200": (8e12, 2250e12), "TPU v4": (1.23e12, 275e12),
    "TPU v5 lite": (0.82e12, 197e12), "TPU v5": (2.77e12, 459e12), "TPU v6 lite": (1.64e12, 918e12),
}  # fmt: skip

# (where in the result, at least or at most, bar)
BARS = (
    *((f"{model}: {what}", kind, bar) for model, speed in (("qwen3-8b", 900), ("qwen3-4b", 1660)) for what, kind, bar in (
        ("plain, share of the floor", ">=", 0.70), ("verify(16) / plain", "<=", 1.15), ("draft / plain", "<=", 0.30),
        (f"tokens/s at tau {TAU}", ">=", speed), ("8 rows / 1 row", ">=", 4.0),
    )),
    ("training: share of peak", ">=", 0.35),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        models: A target's shape by name.
        layers: Of the drafts.
        used: Positions in the caches before a round.
        loop: Rounds a call.
        probe: Width of the square product; what is copied, and read for a product with a vector, is 8 squares.
        sequences, length, anchors: Of a training batch.
        steps: Training steps a call.
        embedding: The target's dtype in training. XLA's CPU backend lacks a product of bfloat16 attention.
    """

    models: Mapping[str, TargetConfig]
    layers: int
    used: int
    loop: int
    probe: int
    sequences: int
    length: int
    anchors: int
    steps: int
    embedding: str = "bfloat16"


def qwen3(width: int, mlp: int, tied: bool, **other: Any) -> TargetConfig:
    shape: dict[str, Any] = dict(
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    )
    return TargetConfig(
        model_type="qwen3", hidden_size=width, intermediate_size=mlp, tie_word_embeddings=tied, qk_norm=True,
        max_position_embeddings=40960, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6), **(shape | other),
    )  # fmt: skip


FULL = Sizes(
    models={"qwen3-8b": qwen3(4096, 12288, tied=False), "qwen3-4b": qwen3(2560, 9728, tied=True)},
    layers=5, used=1024, loop=64, probe=8192, sequences=2, length=768, anchors=256, steps=4,
)  # fmt: skip
_SMALL: dict[str, Any] = dict(
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=256
)
TINY = Sizes(
    models={"qwen3-8b": qwen3(64, 96, tied=False, **_SMALL), "qwen3-4b": qwen3(48, 96, tied=True, **_SMALL)},
    layers=1, used=64, loop=12, probe=64, sequences=2, length=32, anchors=4, steps=2, embedding="float32",
)  # fmt: skip


def draft_config(target: TargetConfig, layers: int) -> DraftConfig:
    """z-lab's draft for it."""
    c = target
    return DraftConfig(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=layers,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim,
        vocab_size=c.vocab_size, max_position_embeddings=c.max_position_embeddings, rms_norm_eps=c.rms_norm_eps,
        rope=c.rope, qk_norm=True, block_size=BLOCK, mask_token_id=c.vocab_size - 1,
        target_layer_ids=build_target_layer_ids(c.num_hidden_layers, layers), num_target_layers=c.num_hidden_layers,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("shape",))
def _normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    return scale * jax.random.normal(key, shape, jnp.bfloat16)


def random_weights(config: TargetConfig | DraftConfig, key: jax.Array) -> dict[str, Any]:
    """bfloat16 parameters, made on the device.

    The layers of a target hardly move the residual stream and its head is its embedding, so that it says its
    last token again, in any rounding: what a script of proposals must know to be accepted as far as it says.
    """
    leaves: dict[str, jax.Array] = {}
    target = isinstance(config, TargetConfig)
    for i, (path, shape) in enumerate(keys.expected_shapes(config).items()):
        quiet = target and path.endswith(("o_proj/weight", "down_proj/weight"))
        scale = 1.0 if path == "embed_tokens/weight" else 2e-5 if quiet else 0.02
        norm = len(shape) == 1
        leaves[path] = jnp.ones(shape, jnp.bfloat16) if norm else _normal(jax.random.fold_in(key, i), shape, scale)  # fmt: skip
    if target and not config.tie_word_embeddings:
        leaves["lm_head/weight"] = jnp.copy(leaves["embed_tokens/weight"])
    return dict(keys.nest(leaves))


def committed(rounds: int, seed: int) -> list[int]:
    """Tokens that each of `rounds` rounds is to commit: spread as `COMMITTED`, some one more for a mean of `TAU`."""
    ends = np.cumsum(COMMITTED) / sum(COMMITTED)
    counts = 1 + np.searchsorted(ends, (np.arange(rounds) + 0.5) / rounds)
    rng = np.random.default_rng(seed)
    raised = rng.choice(np.flatnonzero(counts < BLOCK), round(TAU * rounds) - counts.sum(), False)
    counts[raised] += 1
    return rng.permutation(counts).tolist()


def script(counts: Sequence[int], used: int, size: int, token: int) -> np.ndarray:
    """Proposals by position, right until the last position of each round."""
    said = np.full(size, token, np.int32)
    said[used - 1 + np.cumsum(counts)] = token + 1
    return said


@functools.partial(jax.jit, static_argnames=("step", "rounds"), donate_argnames=("carry",))
def _looped(step: Callable[[Any, Any], Any], params: Any, carry: Any, rounds: int) -> Any:
    return jax.lax.fori_loop(0, rounds, lambda _, carry: step(params, carry), carry)


def looped(
    step: Callable[[Any, Any], Any], params: Any, carry: Any, rounds: int
) -> Callable[[], Any]:
    """Calls that each run `rounds` steps, one behind the other, in one program."""
    held = [carry]

    def call() -> Any:
        held[0] = _looped(step, params, held[0], rounds)
        return held[0]

    return call


def decoding(
    models: Models, params: Any, state: State, counts: Sequence[Sequence[int]]
) -> Callable[[], Any]:
    """Calls of the decoder's own loop that each start from the same length.

    Args:
        counts: What each row is to commit in each round; checked once.
    """
    rows, rounds, held = len(counts), len(counts[0]), [state]
    length = np.array(state.length)  # a copy: the state is donated

    def call() -> Any:
        state = decode(models, params, held[0], np.int32(rounds))
        ends, draft, cached = state.length, state.draft, length - 1
        state = state.replace(
            length=jnp.array(length), rounds=jnp.zeros(rows, jnp.int32), finish=jnp.full(rows, RUNNING, jnp.int32),
            target=state.target.replace(length=jnp.array(cached)),
            draft=None if draft is None else draft.replace(length=jnp.array(cached)),
        )  # fmt: skip
        held[0] = state
        return ends

    np.testing.assert_array_equal(np.asarray(call()) - length, np.sum(counts, axis=1))
    return call


def verifying(models: Models, params: Any, state: State, rounds: int) -> Callable[[], Any]:
    """The target's forward and its head over a block, which is what it said to the last one."""

    def step(params: Any, carry: Any) -> Any:
        tokens, cache = carry
        hidden, _, cache = models.target.forward(params, tokens, cache)
        return argmax(models.target.logits(params, hidden)), cache

    tokens = jnp.ones((len(state.length), BLOCK), jnp.int32)
    return looped(step, params, (tokens, state.target), rounds)


def drafting(
    models: Models, params: Any, state: State, features: int, rounds: int
) -> Callable[[], Any]:
    """A draft's part of a round: the block, the head, the context's keys and values."""
    fns, anchor, sampling = models.draft, jnp.array(state.length - 1), state.sampling
    assert fns is not None

    def step(params: Any, carry: Any) -> Any:
        text, context, cache = carry
        pick = Picker(sampling, anchor, "coupled")
        drafted, cache = fns.propose(params, text, cache, BLOCK, pick)
        # Together, or the context's product would be done once before the loop.
        tokens, context = jax.lax.optimization_barrier((drafted.tokens, context))
        text = write_rows(text, tokens[:, :1], anchor, axis=1)
        return text, context, fns.extend(params, context, cache)

    context = jnp.ones((features, len(state.length), BLOCK), jnp.bfloat16)
    return looped(step, params, (state.tokens, context, state.draft), rounds)


def device(sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Bytes/s and FLOP/s of this device, measured, and its data sheet's."""
    n, loop = sizes.probe, sizes.loop
    rows = 8 * n  # a matrix that no cache holds
    matrix = _normal(jax.random.key(0), (rows, n), n**-0.5)
    square = _normal(jax.random.key(1), (n, n), n**-0.5)

    def vector(matrix: Any, x: Any) -> Any:
        return (matrix @ x)[:n].astype(x.dtype)

    ways = {
        "copy": looped(lambda _, x: -x, None, jnp.copy(matrix), loop),
        "matrix-vector": looped(vector, matrix, jnp.ones((n, 1), jnp.bfloat16), loop),
        "product": looped(lambda w, x: w @ x, square, jnp.copy(square), loop),
    }
    seconds = {name: s / loop for name, s in timing.alternate(ways, rounds).items()}
    kind = jax.devices()[0].device_kind
    sheet = DATA_SHEETS.get(kind)
    read = {"copy": 2 * matrix.nbytes / seconds["copy"], "matrix-vector": matrix.nbytes / seconds["matrix-vector"]}  # fmt: skip
    return {
        "kind": kind,
        "gigabytes_per_second": {name: value / 1e9 for name, value in read.items()},
        "data_sheet_gigabytes_per_second": sheet and sheet[0] / 1e9,
        "teraflops": 2 * n**3 / seconds["product"] / 1e12,
        "data_sheet_teraflops": sheet and sheet[1] / 1e12,
    }


def bytes_a_token(config: TargetConfig, used: int) -> int:
    """What plain decoding must read for a token of one row: every weight once, and the cache that is in use."""
    c, shapes = config, keys.expected_shapes(config)
    weights = sum(math.prod(shape) for shape in shapes.values())
    if not c.tie_word_embeddings:
        weights -= math.prod(shapes["embed_tokens/weight"])  # one row of it
    return 2 * (weights + 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * used)


def model(config: TargetConfig, sizes: Sizes, rounds: int, bandwidth: float) -> dict[str, Any]:
    """A pair's times and ratios.

    Args:
        bandwidth: Bytes/s that the floor is reckoned with.
    """
    used, loop, token = sizes.used, sizes.loop, 1
    size = capacity(used + round(TAU * loop) + 2 * BLOCK)
    target = Target(config, random_weights(config, jax.random.key(0)), (), Path("random"))
    drafts = draft_config(config, sizes.layers)
    draft = Draft(drafts, random_weights(drafts, jax.random.key(1)), Path("random"))
    plain, own = bind(target, None)
    models, params = bind(target, draft, BLOCK)
    assert models.draft is not None
    told = dataclasses.replace(models, draft=Dictated(models.draft))

    def forced(rows: int) -> Callable[[], Any]:
        counts = [committed(loop, seed) for seed in range(rows)]
        said = jnp.asarray(np.stack([script(row, used, size, token) for row in counts]))
        return decoding(
            told, params | {"script": said}, at_length(target, draft, used, size, rows), counts
        )

    features = len(drafts.target_layer_ids) * config.hidden_size
    ways = {
        "plain": decoding(plain, own, at_length(target, None, used, size), [[1] * loop]),
        "verify(16)": verifying(models, params, at_length(target, None, used, size), loop),
        "draft": drafting(models, params, at_length(target, draft, used, size), features, loop),
        "forced": forced(1),
        "forced, 8 rows": forced(8),
    }  # fmt: skip
    each = {name: s / loop for name, s in timing.alternate(ways, rounds).items()}
    floor = bytes_a_token(config, used + loop // 2) / bandwidth
    tau = sum(committed(loop, 0)) / loop
    return {
        "milliseconds": {name: 1e3 * s for name, s in each.items()},
        "floor_milliseconds": 1e3 * floor,
        "tau": tau,
        "plain, share of the floor": floor / each["plain"],
        "verify(16) / plain": each["verify(16)"] / each["plain"],
        "draft / plain": each["draft"] / each["plain"],
        f"tokens/s at tau {TAU}": tau / each["forced"],
        "forced / plain": tau * each["plain"] / each["forced"],
        "8 rows / 1 row": 8 * each["forced"] / each["forced, 8 rows"],
    }


def training_flops(config: DraftConfig, length: int, anchors: int, visible: float) -> float:
    """Of one sequence's step: forward, and gradients by all that trains; the frozen head has those by its input.

    Args:
        visible: Context positions that a block sees, on average.
    """
    c, rows = config, anchors * config.block_size
    width, kv = c.num_attention_heads * c.head_dim, 2 * c.num_key_value_heads * c.head_dim
    of_kv = c.hidden_size * kv
    layer = 2 * c.hidden_size * width + of_kv + 3 * c.hidden_size * c.intermediate_size
    fc = len(c.target_layer_ids) * c.hidden_size**2
    products = c.num_hidden_layers * (rows * layer + length * of_kv) * 3 + length * fc * 2 + rows * c.hidden_size * c.vocab_size * 2  # fmt: skip
    return 2 * products + 3 * 4 * c.num_hidden_layers * width * rows * (visible + c.block_size)


def batch(config: DraftConfig, sizes: Sizes) -> Blocks:
    """Sequences whose anchors are spread evenly, with random features."""
    c, B, S, A = config, sizes.sequences, sizes.length, sizes.anchors
    tokens = jax.random.randint(jax.random.key(2), (B, S), 0, c.vocab_size)
    anchors = jnp.broadcast_to(jnp.linspace(0, S - c.block_size, A).astype(jnp.int32), (B, A))
    features = _normal(jax.random.key(3), (B, S, len(c.target_layer_ids) * c.hidden_size), 1.0)
    return make_blocks(
        tokens, features, jnp.ones((B, S), bool), anchors, jnp.ones((B, A), bool), c.block_size
    )


def training(sizes: Sizes, rounds: int, peak: Mapping[str, float | None]) -> dict[str, Any]:
    """A step of the first model's draft, products in bfloat16.

    Args:
        peak: FLOP/s by where they come from; the step is held against the first that is known.
    """
    target = next(iter(sizes.models.values()))
    config = draft_config(target, sizes.layers)
    blocks, params = batch(config, sizes), random_params(config, jax.random.key(4))
    shape = (target.vocab_size, target.hidden_size)
    tables = [_normal(jax.random.key(seed), shape, 0.02) for seed in (5, 6)]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(6e-4, 0.9, 0.95))
    ones = jnp.ones(len(config.target_layer_ids) * config.hidden_size)
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), ones)
    options: dict[str, Any] = dict(
        module=DFlashDraftModel(config), optimizer=optimizer, objective=Objective(gamma=7.0), chunk=1024, dtype="bfloat16"
    )  # fmt: skip

    def step(given: Any, state: TrainState) -> TrainState:
        (embedding, head), blocks = given
        embedding = embedding.astype(sizes.embedding)
        return train_step(state, embedding, None, blocks, head=head, **options)[0]

    ways = {"step": looped(step, (tables, blocks), state, sizes.steps)}
    seconds = timing.alternate(ways, rounds)["step"] / sizes.steps
    visible = float(blocks.anchors.mean())
    flops = sizes.sequences * training_flops(config, sizes.length, sizes.anchors, visible)
    shares = {name: flops / seconds / value for name, value in peak.items() if value}
    return {
        "milliseconds": 1e3 * seconds,
        "teraflop": flops / 1e12,
        "share of peak": next(iter(shares.values())),
        "shares": shares,
    }


def table(result: Mapping[str, Any]) -> str:
    """What was measured beside its bar, a line each."""
    rows = []
    for name, kind, bar in BARS:
        section, _, what = name.partition(": ")
        value = result.get(section, {}).get(what)
        if value is not None:
            met = value >= bar if kind == ">=" else value <= bar
            rows.append((name, f"{value:.4g}", f"{kind} {bar:g}", "met" if met else "missed"))
    rows = [("", "measured", "bar", ""), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows
    )  # fmt: skip


def measure(sizes: Sizes, only: Sequence[str], rounds: int) -> dict[str, Any]:
    """The device and each of `only`; what one section holds on the device is gone before the next."""
    found: dict[str, Any] = {"device": device(sizes, rounds)}
    here = found["device"]
    bandwidth = 1e9 * max(here["gigabytes_per_second"].values())
    peak = {"data sheet": here["data_sheet_teraflops"], "measured": here["teraflops"]}
    for name in only:
        if name == "training":
            found[name] = training(sizes, rounds, {k: v and 1e12 * v for k, v in peak.items()})
        else:
            found[name] = model(sizes.models[name], sizes, rounds, bandwidth)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    sections = [*FULL.models, "training"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=sections, default=sections)
    parser.add_argument(
        "--rounds", type=int, default=5, help="counted calls of each way, at least 5 in a result"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="sizes for a CPU; measures nothing, writes nothing"
    )
    args = parser.parse_args(arguments)
    result = measure(TINY if args.tiny else FULL, args.only, args.rounds)
    print(json.dumps(result, indent=1))
    print(table(result))
    if not args.tiny:
        print(timing.write("accelerator", result))


if __name__ == "__main__":
    main()
