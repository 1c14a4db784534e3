# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. Convert and inspect
#
# One draft, written in three dialects and read back bit for bit; where each of them keeps each fact; and
# what `inspect` says of checkpoints in which one such fact is wrong. Most of these faults are silent: such a
# draft loads in one system or another, and is merely never right.

# %%
import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax.cache import KVCache
from dflash_jax.checkpoint import export, orbax
from dflash_jax.checkpoint.inspect import inspect
from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig
from dflash_jax.models.transformer import Transformer
from dflash_jax.pair import EMBEDDED_DRAFT
from train.warm_start import random_params

plt.style.use("style.mplstyle")

# %% [markdown]
# ## What is a checkpoint?
#
# `inspect` reads the config, the names and shapes of the tensors and every weight once, and needs no target; with one
# it also judges the pair. On the command line it is `dflash-jax inspect REF [--target REF]`. The embedded draft:


# %%
def tell(report):
    for f in report.findings:
        print(f"{f.severity}: {f.field}\n    {f.effect}\n    mend: {f.mend}")
    print("sound" if report.sound else "not sound")


report = inspect(EMBEDDED_DRAFT)
for name, value in report.about.items():
    if name != "source":
        print(f"{name:24}{value}")
tell(report)

# %% [markdown]
# ## A pair to write
#
# Conversion does not care about size, so a tiny random pair will do: a Qwen3 target of four layers, and a draft of two
# that reads two of them.

# %%
home, folder = os.getcwd(), tempfile.TemporaryDirectory()
os.chdir(folder.name)

shape = dict(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64,
    max_position_embeddings=512, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6), qk_norm=True,
)  # fmt: skip
target_config = TargetConfig(
    model_type="qwen3", num_hidden_layers=4, tie_word_embeddings=True, **shape
)
draft_config = DraftConfig(
    num_hidden_layers=2, block_size=8, mask_token_id=60, target_layer_ids=(0, 2), num_target_layers=4, **shape
)  # fmt: skip
empty = KVCache.zeros(4, 1, 2, 16, 8, jnp.float32)
params = jax.jit(Transformer(target_config).init)(jax.random.key(0), jnp.zeros((1, 8), int), empty)
export.save_target("target", target_config, params["params"], stop_token_ids=(63,))
target = dj.load_target("target")
params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(draft_config, jax.random.key(1)))  # fmt: skip

# %% [markdown]
# ## Three dialects
#
# *zlab* is the flat one, also of NeMo and SpecForge, and every consumer reads it; *speculators* is nested, and vLLM's
# own; the third is this library's, an Orbax directory whose leaves can be restored onto any sharding.

# %%
export.save_draft("zlab", draft_config, params, dialect="zlab")
export.save_draft("speculators", draft_config, params, dialect="speculators", verifier="target")
orbax.save("orbax", "draft", draft_config, params)

drafts = {
    name: dj.load_draft(name, target, window_rule="zlab", dtype="bfloat16")
    for name in ("zlab", "speculators", "orbax")
}
for name, draft in drafts.items():
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), draft.params, params)  # fmt: skip
    print(f"{name:12s} {len(jax.tree.leaves(same))} tensors equal: {all(jax.tree.leaves(same))}", end=", ")  # fmt: skip
    print(f"config equal: {draft.config == draft_config}")

# %% [markdown]
# What a dialect has no word for, it refuses to write, rather than to write something near it. A draft whose layers slide
# by speculators' rule, for one, would slide by another rule wherever the flat form is read:

# %%
sliding = dataclasses.replace(
    draft_config, layer_types=("sliding_attention",) * 2, sliding_window=128, is_causal=True, window_rule="speculators"
)  # fmt: skip
try:
    export.save_draft("sliding", sliding, params, dialect="zlab")
except ValueError as e:
    print(e)

# %% [markdown]
# The same facts stand in quite different places. Mind the taps: the same two layers are `[0, 2]` in one dialect and
# `[1, 3]` in the other, where 0 would be the embedding.

# %%
FACTS = {
    "block size": ("block_size",),
    "mask token": ("mask_token_id",),
    "taps": ("target_layer_ids", "aux_hidden_state_layer_ids"),
    "RoPE's base": ("rope_theta", "theta"),
    "layers": ("num_hidden_layers",),
    "causal": ("is_causal", "sliding_window_non_causal"),
    "target": ("num_target_layers", "name_or_path"),
}


def leaves(config, path=""):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key} > ")
        else:
            yield path + key, value


def places(dialect, names):
    """Where a checkpoint's config has a fact, as text; up to two places."""
    config = leaves(json.loads(Path(dialect, "config.json").read_text()))
    found = [(k, v) for k, v in config if k.rpartition(" > ")[2] in names and v is not None]
    return "\n".join(f"{k}: {json.dumps(v)}".replace(" > ", " >\n   ") for k, v in found[:2])


DIALECTS = {"zlab": "z-lab, flat", "speculators": "speculators, nested", "orbax": "Orbax"}
rows = [[places(dialect, names) for dialect in DIALECTS] for names in FACTS.values()]
heights = [max(cell.count("\n") + 1 for cell in row) + 0.8 for row in rows]
figure, axis = plt.subplots(figsize=(7, 0.145 * sum(heights) + 0.4), layout="none")
figure.subplots_adjust(0, 0, 1, 1)
axis.axis("off")
axis.set(xlim=(0, 1), ylim=(sum(heights), -2))
columns = (0.14, 0.43, 0.75)
for x, title in zip(columns, DIALECTS.values()):
    axis.text(x, -0.6, title, weight="bold", size=8)
top = 0
for fact, row, height in zip(FACTS, rows, heights):
    axis.axhline(top, color="0.8", lw=0.8, ls="-")
    axis.text(0.01, top + 0.4, fact, va="top", size=8)
    for x, cell in zip(columns, row):
        said = cell or "not said"
        axis.text(x, top + 0.4, said, va="top", size=6.5, family="monospace", color="k" if cell else "0.5")  # fmt: skip
    top += height
plt.show()

# %% [markdown]
# ## Broken ones
#
# Each of these is the flat checkpoint with one thing changed. What would `inspect` tell its author?


# %%
def broken(name, change):
    shutil.copytree("zlab", name)
    path = Path(name, "config.json")
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return inspect(name, "target")


# %%
def shift_taps(config):
    config["dflash_config"]["target_layer_ids"] = [1, 3]


# The taps one too high, the classic slip between counting outputs and counting inputs:
tell(broken("shifted", shift_taps))

# %%
# No taps at all: a formula would fill them in, and be wrong for most published drafts.
tell(broken("unnamed", lambda config: config["dflash_config"].pop("target_layer_ids")))

# %%
# Two block sizes, of which each system reads one:
tell(broken("two-sizes", lambda config: config.update(block_size=16)))

# %%
# A mask token that is the target's stop token:
tell(broken("stops", lambda config: config["dflash_config"].update(mask_token_id=63)))

# %% [markdown]
# And two faults that are not in the config: a norm that is missing, which some readers replace by ones, and a projection
# whose weights are no numbers.

# %%
tensors = load_file("zlab/model.safetensors")
for name, change in {
    "missing": lambda t: t.pop("layers.1.self_attn.q_norm.weight"),
    "not-numbers": lambda t: t.update({"fc.weight": t["fc.weight"] * np.nan}),
}.items():
    shutil.copytree("zlab", name)
    changed = dict(tensors)
    change(changed)
    save_file(changed, Path(name, "model.safetensors"))
    tell(inspect(name, "target"))

# %% [markdown]
# Loading refuses what cannot be right, in one line that names every fault:

# %%
try:
    dj.load_draft("stops", target)
except ValueError as e:
    print(e)

# %%
os.chdir(home)
folder.cleanup()

# %% [markdown]
# ## Next
#
# The commands are `python -m convert.hf_to_orbax SOURCE DEST`, and `python -m convert.orbax_to_hf SOURCE DEST --dialect
# zlab|speculators` for the way back; both stream leaf by leaf, so a model need not fit in memory.
# [03_rope_in_float32](03_rope_in_float32.ipynb) measures a fault of numbers instead of names;
# [06_train_a_draft](06_train_a_draft.ipynb) makes a draft to convert.
