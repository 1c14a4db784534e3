"""Time of one training step, beside the PyTorch trainers that are installed.

    python -m benchmarks.training_step [--rounds 9]

Every trainer takes the same step from the same weights: draft forward over the same anchors of one
sequence, loss over the whole vocabulary, gradients, clipping, AdamW, in float32; their first losses
must agree. The steps alternate, torch runs at the better of one and two threads, and compilation and the
first two steps are not counted. Random weights: nothing in a step's cost depends on them.

Peers: speculators 0.9.0 (eager attention; cross-entropy on the target's argmax, logits of the target
included) and SpecForge 0.2.0 (sdpa attention; cross-entropy on the data). `pip install --no-deps` them
beside torch, transformers and what they import. Writes `benchmarks/results/training_step.json`.
"""

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import timing
from dflash_jax.checkpoint import keys
from dflash_jax.checkpoint.export import save_draft, save_target
from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig
from dflash_jax.models.draft import DFlashDraftModel
from train.objective import Objective
from train.step import TrainState, make_blocks, train_step
from train.warm_start import random_params

D, V, LAYERS, TAPS = 576, 49152, 3, (0, 1, 2, 3, 4)
LENGTH, ANCHORS, BLOCK, GAMMA, CHUNK = 512, 64, 8, 4.0, 512
RATE, BETAS = 1e-4, (0.9, 0.95)
OBJECTIVES = {
    "speculators": Objective(
        mixture=(("target_cross_entropy", 1.0),), gamma=GAMMA, normalize="count"
    ),
    "specforge": Objective(gamma=GAMMA),
}

Step = Callable[[], float]
"""Takes one training step and gives its loss."""


def shapes() -> tuple[TargetConfig, DraftConfig]:
    common: dict[str, Any] = dict(
        hidden_size=D, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        vocab_size=V, max_position_embeddings=8192, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e5), qk_norm=True,
    )  # fmt: skip
    target = TargetConfig(
        model_type="qwen3", num_hidden_layers=6, tie_word_embeddings=True, **common
    )
    draft = DraftConfig(
        num_hidden_layers=LAYERS, block_size=BLOCK, mask_token_id=16, target_layer_ids=TAPS, num_target_layers=6, **common,
    )  # fmt: skip
    return target, draft


def make_case() -> dict[str, Any]:
    """One sequence with its anchors, the target's states, and both models' weights."""
    rng = np.random.default_rng(0)
    target, draft = shapes()
    states = rng.standard_normal((LENGTH, D)).astype(np.float32)
    return {
        "tokens": rng.integers(20, V, LENGTH),
        "features": rng.standard_normal((LENGTH, len(TAPS) * D)).astype(np.float32),
        "states": states,
        "normed": states / np.sqrt((states**2).mean(1, keepdims=True) + 1e-6),
        "anchors": np.sort(rng.choice(LENGTH - BLOCK, ANCHORS, replace=False)),
        "target": keys.nest(
            {
                path: np.ones(shape, np.float32)
                if len(shape) == 1
                else rng.standard_normal(shape, np.float32) * 0.02
                for path, shape in keys.expected_shapes(target).items()
            }
        ),
        "draft": random_params(draft, jax.random.key(1)),
    }


def ours(case: dict[str, Any], objective: Objective) -> Step:
    module = DFlashDraftModel(shapes()[1])
    embedding = jnp.asarray(case["target"]["embed_tokens"]["weight"])
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(RATE, *BETAS, weight_decay=0.0)
    )
    params = jax.tree.map(jnp.copy, case["draft"])  # donated
    state = TrainState(
        jnp.zeros((), jnp.int32), params, optimizer.init(params), jnp.ones(len(TAPS) * D)
    )
    tokens, features, normed = (
        jnp.asarray(case[k])[None] for k in ("tokens", "features", "normed")
    )
    anchors = jnp.asarray(case["anchors"], jnp.int32)[None]
    teacher = normed if objective.needs_teacher else None
    everywhere = jnp.ones(tokens.shape, bool)

    def step():
        nonlocal state
        blocks = make_blocks(
            tokens.astype(jnp.int32), features, everywhere, anchors, anchors >= 0, BLOCK, teacher
        )
        state, metrics = train_step(
            state, embedding, None, blocks, module=module, optimizer=optimizer, objective=objective, chunk=CHUNK,
            head=embedding,
        )  # fmt: skip
        return float(jax.block_until_ready(metrics["loss"]))

    return step


def torch_step(parameters, loss: Callable[[], Any]) -> Step:
    import torch

    parameters = [p for p in parameters if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, RATE, BETAS, weight_decay=0.0)

    def step():
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return float(value)

    return step


def speculators(case: dict[str, Any], folder: Path) -> Step:
    import torch
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import core

    target, draft = shapes()
    save_target(folder / "target", target, case["target"], stop_token_ids=(2,))
    save_draft(
        folder / "nested", draft, case["draft"], "float32", dialect="speculators", verifier=str(folder / "target")
    )  # fmt: skip
    config = SpeculatorModelConfig.from_pretrained(folder / "nested")
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = SpeculatorModel.from_pretrained(folder / "nested", config=config).train()
    model.load_verifier_weights()
    for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
        module.requires_grad_(False)
    anchors = torch.from_numpy(case["anchors"])
    core.select_anchors = lambda *_: (anchors, torch.ones(ANCHORS, dtype=torch.bool))
    features, ids, states = (
        torch.from_numpy(case[k])[None] for k in ("features", "tokens", "states")
    )
    documents, everywhere = torch.zeros(1, LENGTH, dtype=torch.long), torch.ones(1, LENGTH)

    def loss():
        return model(
            features, ids, everywhere, states, documents, loss_config=resolve_loss_config("ce", "eager"), gamma=GAMMA,
            max_anchors=ANCHORS,
        )[1]  # fmt: skip

    return torch_step(model.parameters(), loss)


def specforge(case: dict[str, Any], folder: Path) -> Step:
    import torch
    from safetensors.torch import load_file
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel as Draft
    from transformers import Qwen3Config

    draft = shapes()[1]
    save_draft(folder / "flat", draft, case["draft"], "float32")
    config = Qwen3Config.from_pretrained(folder / "flat")
    config._attn_implementation = "sdpa"
    model = Draft(config).train()
    model.load_state_dict(load_file(folder / "flat/model.safetensors"))
    embedding = torch.nn.Embedding(V, D)
    embedding.weight.data = torch.from_numpy(np.array(case["target"]["embed_tokens"]["weight"]))
    head = torch.nn.Linear(D, V, bias=False)
    head.weight = embedding.weight
    embedding.requires_grad_(False)
    trainer = OnlineDFlashModel(
        model, head, embedding, 16, BLOCK, "sdpa", ANCHORS, loss_decay_gamma=GAMMA
    )
    anchors = torch.from_numpy(case["anchors"])[None]
    trainer._sample_anchor_positions = lambda *_, **__: (anchors, anchors >= 0)  # ty: ignore
    ids, features = torch.from_numpy(case["tokens"])[None], torch.from_numpy(case["features"])[None]
    everywhere = torch.ones(1, LENGTH)
    return torch_step(model.parameters(), lambda: trainer(ids, features, everywhere)[0])


PEERS: dict[str, Callable[[dict[str, Any], Path], Step]] = {
    "speculators": speculators,
    "specforge": specforge,
}


def measure(case: dict[str, Any], peer: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Medians of alternating steps, and the peer's over ours."""
    import torch

    own, theirs = ours(case, OBJECTIVES[peer]), PEERS[peer](case, folder)
    first = own(), theirs()
    np.testing.assert_allclose(first[0], first[1], rtol=1e-4)  # the same work
    seconds: dict[str, list[float]] = {"ours": [], "torch, 1 thread": [], "torch, 2 threads": []}
    for n in range(-2, rounds):
        for name, values in seconds.items():
            if name != "ours":
                torch.set_num_threads(int(name.split()[1]))
            start = time.perf_counter()
            (own if name == "ours" else theirs)()
            if n >= 0:
                values.append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(v for k, v in medians.items() if k != "ours")
    return {
        "loss": first, "median_seconds": medians, "ratio": best / medians["ours"],
        "ratio_of_best": min(min(v) for k, v in seconds.items() if k != "ours") / min(seconds["ours"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    case, results = make_case(), {}
    for peer in PEERS:
        if importlib.util.find_spec(peer) is None:
            print(f"{peer} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            results[peer] = measure(case, peer, Path(folder), args.rounds)
        print(json.dumps({peer: results[peer]}, indent=1))
    if results:
        print(timing.write("training_step", {"peers": results}))


if __name__ == "__main__":
    main()
