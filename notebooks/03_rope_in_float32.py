# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3. RoPE in float32
#
# Models run in bfloat16, and a cast of the whole model takes the rotary embedding along. Nothing fails: the text stays
# right, since the target decides it, and the draft is merely accepted less often. This notebook measures
# what is rounded where, and which of the possible mistakes costs what, on the embedded pair.

# %%
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

import dflash_jax as dj
from dflash_jax.cache import KVCache
from dflash_jax.models import apply, transformer
from dflash_jax.models import draft as draft_module
from dflash_jax.models.draft import DFlashDraftModel, first_slot
from dflash_jax.models.transformer import Transformer
from dflash_jax.ops.rope import rope_table
from train.anchors import sample_anchors
from train.objective import Objective, acceptance_length
from train.step import block_hidden, block_rows, in_vocabulary, make_blocks, target_rows
from train.store import read_shard

plt.style.use("style.mplstyle")

target = dj.load_target()
draft = dj.load_draft(None, target)

# %% [markdown]
# ## Three places to round
#
# RoPE turns pair i of a head by the angle *position x frequency_i*. bfloat16 has eight significant bits, so
# from 256 on it has no odd numbers:

# %%
print(np.arange(250, 266).astype(ml_dtypes.bfloat16).astype(int))

# %% [markdown]
# Neighbouring tokens get one position. Rounding can also hit the frequencies, which is what `.to(bfloat16)` does to
# a buffer `inv_freq`, or the product of both. The tables here are made in each way; "float32" is the library's
# own.

# %%
rope, H = draft.config.rope, draft.config.head_dim
frequencies = rope.theta ** (-np.arange(0, H, 2) / H)


def rounded(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


ANGLES = {
    "float32": lambda p: np.float32(p) * np.float32(frequencies)[:, None],
    "frequencies": lambda p: p * rounded(frequencies)[:, None],
    "positions": lambda p: rounded(p) * frequencies[:, None],
    "angles": lambda p: rounded(p * frequencies[:, None]),
}


def table(kind, positions):
    """Sines and cosines `[H/2, positions]`."""
    if kind == "float32":
        return tuple(x[:, 0] for x in rope_table(rope, H, jnp.asarray(positions)[None]))
    angle = ANGLES[kind](np.asarray(positions))
    return jnp.asarray(np.sin(angle), jnp.float32), jnp.asarray(np.cos(angle), jnp.float32)


# %%
positions = np.arange(1, 8192)
exact = np.cos(positions * frequencies[:, None])
shown = np.unique(np.geomspace(1, len(positions), 100).astype(int)) - 1
figure, axes = plt.subplots(1, 2, sharey=True, figsize=(7, 3.2))
for kind, angles in ANGLES.items():
    of_cosine = np.abs(table(kind, positions)[1] - exact)
    step = angles(positions).astype(float) - angles(positions - 1) - frequencies[:, None]
    for axis, error in zip(axes, (of_cosine, np.abs(step))):
        so_far = np.maximum.accumulate(error.max(axis=0))[shown]
        axis.loglog(positions[shown], so_far, marker="", label=kind)
axes[0].set(title="of the cosine", xlabel="position", ylabel="largest error so far")
axes[1].set(title="of the angle between neighbours [rad]", xlabel="position", ylim=(1e-8, 100))
handles, labels = axes[0].get_legend_handles_labels()
figure.legend(handles, labels, title="rounded to bfloat16", loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# On the left, all three are soon wrong by as much as a cosine can be. On the right they differ. Attention sees rotations
# only through the *difference* of two positions, and rounded frequencies are still frequencies: the angle
# between neighbours is slightly off, by the same amount everywhere. With rounded positions or angles it becomes
# noise that grows with the position. So the first mistake is a wrong model that is consistent with itself, and
# the others make a model that falls apart with length.
#
# ## The same text, further on
#
# That relativity is also a way to measure without long texts. Take answers of the target of ordinary length, and
# *shift all positions* by an offset. In exact arithmetic nothing changes; whatever changes is rounding. Both
# models are handed a table of rotations instead of computing it, so every case below runs one program.

# %%
S, COUNT = 160, 6
shard = Path("../train/data/smollm2-responses.safetensors")
answers = [e for e in read_shard(shard)[::97] if len(e.tokens) >= S][:COUNT]
tokens = np.stack([e.tokens[:S] for e in answers]).astype(np.int32)
supervised = np.stack([e.supervised[:S] for e in answers])
c = target.config
reader = Transformer(c, draft.config.target_layer_ids, draft.config.last_tap)


def rotations(module, table):
    """Makes a model take its rotations from a table, at trace time."""
    return mock.patch.object(module, "rope_table", lambda _, __, p: tuple(t[:, p] for t in table))


@jax.jit
def taps(params, tokens, table):
    cache = KVCache.zeros(c.num_hidden_layers, 1, c.num_key_value_heads, S, c.head_dim, jnp.float32)
    with rotations(transformer, table):
        return apply(reader, params, tokens, cache)[1][:, 0].T


features = jnp.stack([taps(target.params, row[None], table("float32", np.arange(S))) for row in tokens])  # fmt: skip

# %% [markdown]
# ## What the target's features become
#
# The taps of one answer, moved to position 2048, against those at position 0. The target shares its head width
# and theta with the draft, so the tables fit both.

# %%
assert (c.head_dim, c.rope.theta) == (H, rope.theta)
MOVED = 2048
figure, axis = plt.subplots(figsize=(5.5, 2.8))
for kind in ANGLES:
    moved = taps(target.params, tokens[:1], table(kind, MOVED + np.arange(S)))
    # Position 0 holds activations that are a thousand times larger than all others.
    pairs = (x[1:].reshape(S - 1, -1, c.hidden_size) for x in (moved, features[0]))
    x, y = pairs
    error = jnp.linalg.norm(x - y, axis=(0, 2)) / jnp.linalg.norm(y, axis=(0, 2))
    axis.semilogy(draft.config.target_layer_ids, error, label=kind)
axis.set(xlabel="tap: after layer", ylabel="relative error of the features")
axis.legend(title="rounded to bfloat16", loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# ## What it costs
#
# Now the draft alone: it is given the right features, and only its own rotations are rounded. At fixed anchors of
# the answers, how many tokens of a block does it get right?

# %%
module, first = DFlashDraftModel(draft.config), first_slot(draft.config)
head = "embed_tokens" if c.tie_word_embeddings else "lm_head"
params = {"draft": draft.params, "table": target.params["embed_tokens"]["weight"]}
d2t = draft.params.get("d2t")
params["head"] = target_rows(target.params[head]["weight"], None, d2t)
anchors, real = sample_anchors(jax.random.key(0), jnp.asarray(supervised), 12)
blocks = make_blocks(
    jnp.asarray(tokens), features, jnp.asarray(supervised), anchors, real, draft.config.block_size, first_slot=first
)  # fmt: skip
blocks = in_vocabulary(blocks, d2t)


@jax.jit
def accepted(params, blocks, table):
    scale = jnp.ones(blocks.features.shape[2])
    with rotations(draft_module, table):
        hidden = block_hidden(module, params["draft"], params["table"], scale, blocks)
    rows = block_rows(
        module, Objective(), 512, params["draft"], hidden, params["table"], params["head"], blocks
    )
    correct = rows.correct.reshape(blocks.labels.shape)
    total, count = acceptance_length(correct, blocks.counts, blocks.real, first)
    return total / count


OFFSETS = (0, 256, 1024, 4096, 7936)
reach = np.arange(S + draft.config.block_size)
figure, axis = plt.subplots(figsize=(5.5, 2.8))
for kind in ANGLES:
    lengths = [float(accepted(params, blocks, table(kind, offset + reach))) for offset in OFFSETS]
    # Larger marks for what the next line may lie on.
    axis.plot(range(len(OFFSETS)), lengths, label=kind, ms=8 if kind == "float32" else 4)
    print(f"{kind:12s}", "  ".join(f"{x:.2f}" for x in lengths))
axis.set(xlabel="offset of all positions", ylabel="tokens a round,\nteacher-forced", ylim=(1, None))
axis.set_xticks(range(len(OFFSETS)), OFFSETS)
axis.legend(title="rounded to bfloat16", loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# Frequencies that are slightly off are forgiven at the distances of these texts; positions that are noise are not, and
# no text would have shown it. In the library, positions are int32, and angles, sines, cosines and the
# rotation itself are float32 in every dtype (`dflash_jax/ops/rope.py`); a test casts a model to bfloat16 and
# compares the tables.
#
# ## Next
#
# [05_convert_and_inspect](05_convert_and_inspect.ipynb) is about other faults of this silent kind, those that sit
# in a config. [04_lossless](04_lossless.ipynb) is about why the text stays right.
