# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. Scale
#
# The library's maths knows no devices; one table says where every array lies on a mesh, and XLA does the rest. Here
# that is tried on eight simulated devices of a CPU: where the parameters go, what the devices say to each other in a training
# step, and whether the losses are those of one device.

# %%
import re
from collections import Counter

import jax

jax.config.update("jax_num_cpu_devices", 8)  # before anything asks for a device

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from dflash_jax.config import DraftConfig, RopeConfig
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.sharding import BATCH, DRAFT, TARGET, VOCABULARY, make_mesh, shard, spec_of
from train.anchors import sample_anchors
from train.config import TrainConfig
from train.objective import Objective
from train.optimizer import make_optimizer
from train.step import TrainState, make_blocks, train_step
from train.warm_start import random_params

plt.style.use("style.mplstyle")

# %% [markdown]
# ## A mesh of three axes
#
# `data` and `fsdp` divide a batch; `fsdp` divides also what is trained; `model` divides matrices by heads, features or ids.
# An axis of length 1 is one that is not used, so a laptop is a mesh too.

# %%
mesh = make_mesh({"data": 2, "fsdp": 2, "model": 2})
alone = make_mesh(devices=jax.devices()[:1])
print(mesh.shape)

# %% [markdown]
# A draft, small but with all its kinds of arrays. The rules are pairs of a pattern and the axes of the leading dimensions, and
# the first pattern found in an array's path holds.

# %%
config = DraftConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=96, max_position_embeddings=256, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e4), qk_norm=True,
    block_size=4, mask_token_id=95, target_layer_ids=(0, 2), num_target_layers=4,
)  # fmt: skip
params = jax.jit(random_params, static_argnums=0)(config, jax.random.key(0))
SHOWN = {
    "fc": "fc/weight",
    "q_proj": "layers_0/self_attn/q_proj/weight",
    "o_proj": "layers_0/self_attn/o_proj/weight",
    "up_proj": "layers_0/mlp/up_proj/weight",
    "down_proj": "layers_0/mlp/down_proj/weight",
    "norm": "norm/weight",
}
RULES = {"a target": TARGET.of(config), "what is trained": DRAFT.of(config)}


def leaf(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return tree


for name, path in SHOWN.items():
    x = leaf(params, path)
    specs = (str(spec_of(path, x.shape, mesh, rules)) for rules in RULES.values())
    print(f"{name:10s} {x.shape!s:12s}", "   ".join(f"{spec:34s}" for spec in specs).rstrip())

# %% [markdown]
# Weights are `[out, in]`. A frozen target divides a product's result over `model` and the next product's sum, so
# the two meet in one exchange. What is trained is divided over `fsdp` as well, with its moments, since those are three
# times the parameters. The pictures ask the arrays themselves; the numbers are the devices that hold a part.

# %%
SHADES = plt.get_cmap("Blues")(np.linspace(0.1, 0.65, 4))


def draw(axis, x, corner):
    """The parts of an array, with its corner there, and the devices of each."""
    columns = x.shape[1] if x.ndim == 2 else 8
    holders = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        spans = [s.indices(n)[:2] for s, n in zip(index, x.shape)] + [(0, columns)]
        holders.setdefault(tuple(spans[:2]), []).append(device.id)
    for shade, (((top, bottom), (left, right)), devices) in zip(SHADES, sorted(holders.items())):
        at, wide, high = (left + corner[0], top + corner[1]), right - left, bottom - top
        axis.add_patch(Rectangle(at, wide, high, fc=shade, ec="k"))
        half = len(devices) // 2 if wide < 64 <= high else len(devices)
        lines = [" ".join(map(str, devices[i : i + half])) for i in range(0, len(devices), half)]
        if wide > 8:
            middle = at[0] + wide / 2, at[1] + high / 2
            axis.text(*middle, "\n".join(lines), ha="center", va="center", size=8)
        else:
            axis.text(at[0] + 14, at[1] + high / 2, "all", va="center", size=8)
    return columns


figure, axis = plt.subplots(figsize=(7, 3.7))
axis.axis("off")
axis.set(xlim=(-20, 610), ylim=(310, -30), aspect="equal")
for top, (kind, rules) in zip((0, 165), RULES.items()):
    placed, left = shard(params, mesh, rules), 0
    axis.text(-6, top + 32, kind, rotation=90, va="center", ha="right", size=9)
    for name, path in SHOWN.items():
        if not top:
            axis.text(left, -6, name, size=9)
        left += draw(axis, leaf(placed, path), (left, top)) + 28
plt.show()

# %% [markdown]
# ## A training step
#
# `train_step` is the one of `train.run`. Under `jax.set_mesh` it places what it makes by the same rules; a batch is divided
# by its rows. The data are noise and always the same: we ask for equal numbers, not for a draft.

# %%
STEPS, ROWS, S = 12, 8, 32
optimizer = make_optimizer(TrainConfig(run="", steps=STEPS, warmup=2, learning_rate=3e-3))
rng = np.random.default_rng(0)
tokens = jnp.asarray(rng.integers(96, size=(ROWS, S)), jnp.int32)
features = jnp.asarray(rng.standard_normal((ROWS, S, 128)), jnp.float32)
table = jnp.asarray(rng.standard_normal((96, 64)), jnp.float32)  # the target's, frozen
supervised = jnp.broadcast_to(jnp.arange(S) > 5, (ROWS, S))
anchors = sample_anchors(jax.random.key(1), supervised, 4)
blocks = make_blocks(tokens, features, supervised, *anchors, config.block_size)


def train(mesh):
    """Losses, the state at the end and the compiled step."""
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jnp.ones(128))
    state = shard(jax.tree.map(jnp.copy, state), mesh, DRAFT.of(config))  # steps donate it
    batch, head = shard(blocks, mesh, BATCH), shard(table, mesh, VOCABULARY)
    with jax.set_mesh(mesh):
        step = train_step.lower(
            state, head, None, batch, module=DFlashDraftModel(config), optimizer=optimizer,
            objective=Objective(), chunk=64, head=head,
        ).compile()  # fmt: skip
        losses = []
        for _ in range(STEPS):
            state, metrics = step(state, head, None, batch, head=head)
            losses.append(float(metrics["loss"]))
    return np.array(losses), state, step


results = {"one device": train(alone), "eight devices": train(mesh)}

# %%
losses = {name: found[0] for name, found in results.items()}
apart = np.abs(losses["eight devices"] - losses["one device"]) / losses["one device"]
assert apart.max() < 1e-5

figure, axes = plt.subplots(1, 2, gridspec_kw={"width_ratios": [3, 2]})
for (name, loss), size in zip(losses.items(), (7, 3.5)):
    axes[0].plot(np.arange(1, STEPS + 1), loss, label=name, ms=size)
axes[0].set(xlabel="step", ylabel="loss [nats, weighted]")
axes[0].legend()


def held(tree):
    """Bytes that each device holds of a tree."""
    held = Counter()
    for x in jax.tree.leaves(tree):
        for part in x.addressable_shards:
            held[part.device.id] += part.data.nbytes
    return [held[i] for i in sorted(held)]


for (_, state, _), color in zip(results.values(), ("#6fa3c8", "#17324d")):
    each = np.array(held((state.params, state.opt_state))) / 1e3
    axes[1].bar(np.arange(len(each)) + (0 if len(each) > 1 else -1.5), each, color=color)
axes[1].set_xticks([-1.5, *range(8)], ["one\ndevice", *range(8)])
axes[1].set(ylabel="parameters and moments [kB]", xlabel="device of eight")
axes[1].grid(axis="x", visible=False)
plt.show()

# %% [markdown]
# The losses differ in the last bits only: sums are taken in another order. The parts of four devices (`fsdp` times `model`)
# make up the whole state; `data` keeps a second copy of it.
#
# ## What the devices say to each other
#
# Nobody wrote a collective. They follow from where the arrays lie, and stand in the compiled program:

# %%
said = re.findall(r" = .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", results["eight devices"][2].as_text())  # fmt: skip
print(dict(Counter(said)))
assert not re.search(r"all-(reduce|gather)", results["one device"][2].as_text())

# %% [markdown]
# ## Next
#
# For a run it is a line in the recipe, and the checkpoint of one mesh goes on on another:
#
#     python -m train.run RECIPE.toml mesh='{data=2,fsdp=2,model=2}'
#
# `generate` works under `jax.set_mesh` in the same way, with parameters from
# `load_target(sharding=mesh)` and `load_draft(..., sharding=mesh)`. The whole table is `dflash_jax/sharding.py`.
