"""Training, decoding and loading on simulated devices, as many as XLA_FLAGS says, in a process of its own.

python tests/meshes.py steps OUT AXES
python tests/meshes.py run STORE RECIPE.toml [key=value ...]
python tests/meshes.py decode OUT AXES
python tests/meshes.py collectives OUT AXES NUMBER ...
python tests/meshes.py load OUT AXES FOLDER ...

AXES are a mesh's, as JSON.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

AXES = {"data": 2, "fsdp": 2, "model": 2}
VOCABULARY, CANDIDATES = 88, 44  # sizes that nothing else has


def steps(mesh) -> dict:
    """Three training steps of a draft whose one key/value head `model` does not divide.

    Rows 2 and 3, which a device of four has for itself, have no anchor.

    Returns:
        Each step's `metrics`, the parameters' `norms` behind the last one, the `normalizer`'s `sums`,
        the rows that were `read`, and the programs.
    """
    from fakes import DRAFT, random_params

    from dflash_jax.models.draft import DFlashDraftModel
    from dflash_jax.sharding import BATCH, place_parts, shard
    from dflash_jax.sharding import DRAFT as RULES
    from dflash_jax.sharding import VOCABULARY as BY_ID
    from train.anchors import sample_anchors
    from train.config import TrainConfig
    from train.normalizer import normalizer
    from train.objective import Objective
    from train.optimizer import make_optimizer
    from train.step import TrainState, make_blocks, train_step

    config = dataclasses.replace(
        DRAFT, num_hidden_layers=1, layer_types=(), block_size=4, vocab_size=VOCABULARY
    )
    optimizer = make_optimizer(TrainConfig(run="", steps=10, warmup=1, learning_rate=3e-3))
    mixture = (("cross_entropy", 0.5), ("kl_divergence", 0.5))
    rng = np.random.default_rng(0)

    @jax.jit
    def blocks(key, tokens, features, teacher):
        supervised = (jnp.arange(24) > 5)[None] & ~jnp.isin(jnp.arange(8), jnp.array([2, 3]))[
            :, None
        ]
        return make_blocks(
            tokens, features, supervised, *sample_anchors(key, supervised, 3), 4, teacher
        )

    def batch(seed):
        tokens = rng.integers(CANDIDATES, size=(8, 24)).astype(np.int32)  # they are labels, too
        rows = [rng.standard_normal((8, 24, n)).astype(np.float32) for n in (64, 32)]
        return shard(blocks(jax.random.key(seed), tokens, *rows), mesh, BATCH)

    params = random_params(config, 0)
    table, head = (rng.standard_normal((VOCABULARY, 32)).astype(np.float32) for _ in range(2))
    ids = np.sort(rng.permutation(VOCABULARY)[:CANDIDATES]).astype(np.int32)
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jnp.ones(64))
    state, table, head = (
        shard(state, mesh, RULES.of(config)),
        shard(table, mesh, BY_ID),
        shard(head, mesh, BY_ID),
    )
    batches = [batch(seed) for seed in range(3)]
    with jax.set_mesh(mesh):
        step = train_step.lower(
            state, table, ids, batches[0], module=DFlashDraftModel(config), optimizer=optimizer,
            objective=Objective(mixture=mixture), chunk=16, head=head,
        ).compile()  # fmt: skip
        metrics = []
        for batch in batches:
            state, values = step(state, table, ids, batch, head=head)
            metrics.append({name: float(value) for name, value in values.items()})
        states = rng.standard_normal((32, 24)).astype(np.float32)
        of_all = jax.jit(normalizer).lower(head, states).compile()
        sums = [np.asarray(x).tolist() for x in of_all(head, states)]
        read, whole = [], np.arange(8.0)[:, None]
        again = place_parts((8, 1), lambda index: read.append(index) or whole[index], BATCH)
        assert np.array_equal(again, whole)
    norms = [float(np.linalg.norm(np.asarray(x))) for x in jax.tree.leaves(state.params)]
    programs = {"program": step.as_text(), "normalizer_program": of_all.as_text()}
    return {
        "metrics": metrics,
        "norms": norms,
        "sums": sums,
        "read": sorted({(i[0].start, i[0].stop) for i in read}),
    } | programs


def decode(mesh) -> dict:
    """Texts of eight prompts, greedy and sampled, and into how many parts the keys behind them are divided."""
    from fakes import prompts_of, random_draft, random_target

    from dflash_jax import Sampling, generate
    from dflash_jax.sharding import TARGET, shard

    target, draft = (
        dataclasses.replace(x, params=shard(x.params, mesh, TARGET.of(x.config)))
        for x in (random_target(), random_draft())
    )
    prompts = prompts_of(5, 17, 3, 9, 21, 4, 8, 30)
    with jax.set_mesh(mesh):
        out = generate(
            target, draft, prompts, max_new_tokens=24, key=jax.random.key(3), keep_state=True,
            sampling=[Sampling(temperature=t, top_k=20) for t in (0.0, 0.8) * 4],
        )  # fmt: skip
        parts = {str(shard.index) for shard in out.state.target.k[0].addressable_shards}
        return {"tokens": out.tokens, "parts": len(parts)}


def collectives(mesh, *shape: str) -> dict:
    """`benchmarks.collectives` of a pair of this shape with two layers each."""
    from benchmarks.collectives import pair, report

    return report(*pair(tuple(map(int, shape)), 2), dict(mesh.shape))


def load(mesh, *folders: str) -> dict:
    """What this process reads of targets, and of drafts behind theirs, as they are loaded onto the mesh.

    Returns:
        By folder the elements `read`, those `held` in different parts, and those of the `whole` model.
        Every part is asserted to be the whole one's.
    """
    from dflash_jax.checkpoint import keys, mapped
    from dflash_jax.pair import load_draft, load_target

    read, part = [], mapped.read_part

    def counted(value, index, dtype):
        read.append(part(value, index, dtype))
        return read[-1]

    mapped.read_part = counted
    found, target = {}, None
    for folder in folders:
        if "targets" in folder:
            plain, placed = load_target(folder), load_target(folder, sharding=mesh)
            target = plain
        else:
            plain = load_draft(folder, target)
            placed = load_draft(folder, target, sharding=mesh)
        whole, held = keys.flatten(plain.params), 0
        for path, leaf in keys.flatten(placed.params).items():
            own = {str(shard.index): shard for shard in leaf.addressable_shards}
            held += sum(shard.data.size for shard in own.values())
            for shard in own.values():
                assert np.array_equal(shard.data, np.asarray(whole[path])[shard.index]), path
        found[Path(folder).name] = {
            "read": sum(x.size for x in read), "held": held, "whole": sum(x.size for x in whole.values())
        }  # fmt: skip
        read.clear()
    return found


def run(store: str, recipe: str, *overrides: str) -> None:
    """`train.run`'s own way from the recipe on, with the tiny target."""
    from train.config import read_recipe
    from train.mesh import start
    from train.run import train

    config = read_recipe(Path(recipe), overrides)
    mesh = start(config)
    from runs import set_up_recipe  # has arrays, and so needs the devices

    train(set_up_recipe(Path(store), config, mesh))


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_enable_compilation_cache", False)
    what, *rest = sys.argv[1:]
    if what == "run":
        run(*rest)
    else:
        if "JAX_PROCESS_ID" in os.environ:
            jax.distributed.initialize(
                num_processes=2, process_id=int(os.environ["JAX_PROCESS_ID"])
            )
        from dflash_jax.sharding import make_mesh

        out, axes, *rest = rest
        Path(out).write_text(json.dumps(globals()[what](make_mesh(json.loads(axes)), *rest)))
