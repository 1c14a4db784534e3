"""What the devices of a mesh say to each other in a round of decoding, against what the layout calls for.

    python -m benchmarks.collectives [--layers 3]

Compiles `decode` for eight simulated devices and reads the collectives of the optimised program; nothing is run,
weights are shapes only. Tensor-parallel, data-parallel and both, for two pairs: the embedded one's shape, whose 9 heads
2 and 8 do not divide, and Qwen3-4B's with a draft like z-lab's. Layers are few: what they say is the same in each.
Writes `benchmarks/results/collectives.json` and prints it. A number of `found` is of arrays: XLA sends some of
them together.
"""

import argparse
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import timing
from dflash_jax.adapters import bind
from dflash_jax.checkpoint import keys
from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig
from dflash_jax.decode import decode
from dflash_jax.pair import Draft, Target
from dflash_jax.sharding import TARGET, make_mesh, placement, spec_of
from dflash_jax.states import new_draft_cache, new_state

ROWS, SLOTS, BLOCK = 8, 256, 8
MESHES = {"tensor-parallel": {"model": 8}, "data-parallel": {"data": 8}, "both": {"data": 4, "model": 2}}  # fmt: skip
# (width, MLP's width, heads, key/value heads, head's width, vocabulary)
SHAPES = {
    "embedded": (576, 1536, 9, 3, 64, 49152),
    "Qwen3-4B": (2560, 9728, 32, 8, 128, 151936),
}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_BYTES = {"pred": 1, "s32": 4, "u32": 4, "f32": 4, "bf16": 2}


class Collective(NamedTuple):
    """One array that devices exchange.

    Attributes:
        kind: XLA's name of the exchange.
        where: The scopes it stands in within the loop's body; behind "call/" where it is outside of the loop.
        array: Its dtype and shape on a device.
        nbytes: Of that.
    """

    kind: str
    where: str
    array: str
    nbytes: int


class Reason(NamedTuple):
    """Exchanges that the layout calls for.

    Attributes:
        part: Of the round.
        kind: XLA's name of the exchange.
        where: Pattern of their scopes.
        count: How many arrays a round; None where it is not predicted.
        why: For people.
    """

    part: str
    kind: str
    where: str
    count: int | None
    why: str


def pair(shape: tuple[int, ...], layers: int) -> tuple[TargetConfig, DraftConfig]:
    """Configs of a target with that many layers and a draft with two."""
    D, F, N, K, H, V = shape
    common: dict[str, Any] = dict(
        hidden_size=D, intermediate_size=F, num_attention_heads=N, num_key_value_heads=K, head_dim=H, vocab_size=V,
        max_position_embeddings=4096, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e4), qk_norm=True,
    )  # fmt: skip
    target = TargetConfig(model_type="qwen3", num_hidden_layers=layers, **common)
    draft = DraftConfig(
        num_hidden_layers=2, block_size=BLOCK, mask_token_id=0, target_layer_ids=(0, layers - 1),
        num_target_layers=layers, **common,
    )  # fmt: skip
    return target, draft


def program(target: TargetConfig, draft: DraftConfig, mesh: Mesh) -> str:
    """The optimised `decode` of the pair on the mesh."""

    def params(config: TargetConfig | DraftConfig) -> Any:
        place = placement(mesh, TARGET.of(config))
        return keys.nest({
            path: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place(path, shape))
            for path, shape in keys.expected_shapes(config).items()
        })  # fmt: skip

    with jax.set_mesh(mesh):
        a, b = Target(target, params(target), (), Path()), Draft(draft, params(draft), Path())
        models, weights = bind(a, b)
        state = new_state(a, [[1]] * ROWS, [8] * ROWS, (), SLOTS)
        state = state.replace(draft=new_draft_cache(b, ROWS, SLOTS))
        lowered = decode.lower(models, weights, state, np.int32(1), np.int32(1))
    options: Any = {
        "xla_backend_optimization_level": 0
    }  # of the machine code, which is not looked at
    return lowered.compile(options).as_text() or ""


def collectives(text: str) -> Iterator[Collective]:
    """Every array that the program's devices exchange."""
    entry = False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            entry = line.startswith("ENTRY")
        found = re.search(rf" = (.*?) ({_KINDS})(?:-start)?\(", line)
        if not found:
            continue
        name = re.search(r'op_name="jit\(decode\)/while/([^"]*)"', line)
        scope = name[1].removeprefix("body/") if name else ""
        where = (
            f"call/{scope}" if entry else scope
        )  # XLA takes out of the loop what no round changes
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", found[1]):
            size = math.prod(map(int, filter(None, dims.split(","))))
            yield Collective(found[2], where, f"{dtype}[{dims}]", size * _BYTES[dtype])


def reasons(target: TargetConfig, draft: DraftConfig, mesh: Mesh) -> list[Reason]:
    """What a greedy round needs on the mesh, and what sampling may add."""

    def divided(config: TargetConfig | DraftConfig, path: str) -> bool:
        shape = keys.expected_shapes(config)[path]
        return "model" in spec_of(path, shape, mesh, TARGET.of(config)) and mesh.shape["model"] > 1

    def sums(config: TargetConfig | DraftConfig, name: str) -> int:
        return config.num_hidden_layers * divided(config, f"layers_0/{name}/weight")

    head = 4 * divided(target, "embed_tokens/weight")
    rows = math.prod(mesh.shape.values()) > mesh.shape["model"]
    table = int(divided(target, "embed_tokens/weight"))
    found = [
        Reason("target's layers", "all-reduce", r"^Transformer/.*layers_\d+\..*/o_proj/", sums(target, "self_attn/o_proj"),
               "a sum over each device's heads, once a layer"),
        Reason("target's layers", "all-reduce", r"^Transformer/.*layers_\d+\..*/down_proj/", sums(target, "mlp/down_proj"),
               "a sum over each device's MLP features, once a layer"),
        Reason("target's embedding", "all-reduce", r"^Transformer/.*embed_tokens/gather", table,
               "each device has some ids' rows"),
        Reason("target's tokens", "all-reduce", r"^(\(.*)?(reduce_(max|min|sum)|jit\(take_along_axis\))", head,
               "the largest logit of each device's ids, its 256 neighbours, the first of them, and whether any is NaN"),
        Reason("draft's layers", "all-reduce", r"^DFlashDraftModel/layers_\d+\..*/o_proj/", sums(draft, "self_attn/o_proj"),
               "as the target's"),
        Reason("draft's layers", "all-reduce", r"^DFlashDraftModel/layers_\d+\..*/down_proj/", sums(draft, "mlp/down_proj"),
               "as the target's"),
        Reason("draft's embedding", "all-reduce", r"^Transformer\.embed/embed_tokens/gather", table, "as the target's"),
        Reason("draft's tokens", "all-reduce", r"^DFlashDraftModel\.propose/head\.propose/(\(?reduce_(max|min|sum)|\(?jit\(take)",
               head, "as the target's"),
        Reason("taps", "all-gather", r"^DFlashDraftModel\.extend/", int(divided(draft, "fc/weight")),
               "every layer's keys and values need the whole projected context"),
        Reason("end", "all-reduce", r"^cond/", 2 * rows, "whether rows still run, and have room"),
        Reason("how rows sample", "all-reduce", r"^call/.*reduce_(or|and)\b", 4 * rows,
               "once a call: whether any row samples, and any with filters; for the draft's tokens and the target's"),
    ]  # fmt: skip
    return found


SAMPLED = r"(^|/)cond/branch_[12]_fun/"  # of `sampling.sample`'s switch


def report(target: TargetConfig, draft: DraftConfig, axes: Mapping[str, int]) -> dict[str, Any]:
    """Predicted and found exchanges of a round on a mesh, those that sampling adds, and those without a reason."""
    mesh = make_mesh(axes)
    every = list(collectives(program(target, draft, mesh)))
    sampled = [c for c in every if re.search(SAMPLED, c.where)]
    rest = [c for c in every if c not in sampled]
    rows = []
    for reason in reasons(target, draft, mesh):
        own = [c for c in rest if c.kind == reason.kind and re.search(reason.where, c.where)]
        rest = [c for c in rest if c not in own]
        if own or reason.count:
            named = {k: v for k, v in reason._asdict().items() if k not in ("where", "count")}
            rows.append(named | {
                "predicted": reason.count, "found": len(own), "bytes": sum(c.nbytes for c in own),
                "arrays": sorted({c.array for c in own}),
            })  # fmt: skip
    return {
        "axes": dict(axes),
        "round": rows,
        "sampling": [c._asdict() for c in sampled],
        "unexplained": [c._asdict() for c in rest],
    }


def show(title: str, found: Mapping[str, Any]) -> None:
    axes = ", ".join(f"{name} {n}" for name, n in found["axes"].items())
    print(
        f"\n{title} ({axes})\n{'part':20s} {'kind':12s} {'predicted':>9s} {'found':>6s} {'bytes':>9s}  why"
    )
    for row in found["round"]:
        print(f"{row['part']:20s} {row['kind']:12s} {row['predicted']:9d} {row['found']:6d} {row['bytes']:9d}  {row['why']}")  # fmt: skip
    largest = max(found["sampling"], key=lambda c: c["nbytes"], default=None)
    if largest:
        print(
            f"where rows sample {len(found['sampling'])} more, the largest {largest['kind']} {largest['array']}"
        )
    for c in found["unexplained"]:
        print(f"UNEXPLAINED {c['kind']} {c['array']} in {c['where']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--layers", type=int, default=3, help="of the target (default: 3)")
    layers = parser.parse_args().layers
    jax.config.update("jax_num_cpu_devices", 8)
    result: dict[str, Any] = {"rows": ROWS, "block_size": BLOCK, "layers": layers, "pairs": {}}
    for name, shape in SHAPES.items():
        result["pairs"][name] = {}
        for kind, axes in MESHES.items():
            found = report(*pair(shape, layers), axes)
            result["pairs"][name][kind] = found
            show(f"{name}, {kind}", found)
    print(f"\nwritten to {timing.write('collectives', result)}")


if __name__ == "__main__":
    main()
