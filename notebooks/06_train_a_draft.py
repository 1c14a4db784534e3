# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6. Train a draft
#
# From nothing to a draft that decodes, in a minute: a tiny target is taught to count, answers prompts,
# and a draft learns from its answers with the functions that `train.run` uses on real models. You will see
# the loss and the acceptance length rise, measured in two ways, and what the draft has understood.

# %%
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import dflash_jax as dj
from dflash_jax.cache import KVCache
from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.models import apply
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.models.transformer import Transformer
from train.config import TrainConfig
from train.data import frequent_ids
from train.draft import draft_config, export, first_state
from train.optimizer import make_optimizer
from train.regenerate import regenerate
from train.run import evaluate_all, one_step
from train.setup import Setup

plt.style.use("style.mplstyle")

# %% [markdown]
# ## A target
#
# Usually the target is a file. Here it is two Qwen3 layers that learn, in a few seconds, to go on from
# `43+8:` with `51,59,67,...`. (A model's forward takes a cache; for training that is an empty one.)

# %%
SYMBOLS = "0123456789+:,.?"
IDS = {symbol: i for i, symbol in enumerate(SYMBOLS)}
SIZE = 48


def spell(tokens):
    return "".join(SYMBOLS[i] for i in tokens)


def count(start, step):
    text = f"{start}+{step}:" + ",".join(str(start + step * i) for i in range(1, SIZE))
    return [IDS[symbol] for symbol in text[:SIZE]]


shape = TargetConfig(
    model_type="qwen3", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=len(SYMBOLS), max_position_embeddings=256, rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4), qk_norm=True, tie_word_embeddings=True,
)  # fmt: skip
model = Transformer(shape)


def empty_cache(rows):
    return KVCache.zeros(2, rows, 2, SIZE, 16, jnp.float32)


def target_loss(params, tokens):
    hidden, _, _ = apply(model, params, tokens[:, :-1], empty_cache(len(tokens)))
    logits = apply(model, params, hidden, method="logits").transpose(1, 2, 0)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


TARGET_STEPS, BATCH = 450, 24
optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0, 8e-3, 20, TARGET_STEPS))


@jax.jit
def target_step(carry, tokens):
    params, moments = carry
    loss, gradients = jax.value_and_grad(target_loss)(params, tokens)
    updates, moments = optimizer.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


rng = np.random.default_rng(0)
params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, SIZE), jnp.int32), empty_cache(1))
carry = params["params"], jax.jit(optimizer.init)(params["params"])
for _ in range(TARGET_STEPS):
    tokens = [count(rng.integers(100), rng.integers(1, 10)) for _ in range(BATCH)]
    carry, loss = target_step(carry, np.array(tokens))
target = dj.Target(shape, carry[0], (IDS["."],), source=None)
print(f"loss of the target after {TARGET_STEPS} steps: {float(loss):.2f}")

# %% [markdown]
# ## Its answers
#
# A draft is trained on what its target *says*, right or wrong, since that is what it will have to predict. So
# the training set is a list of prompts, and the target answers them. `regenerate` decodes them in a batch
# and keeps the taps of each token on the way, so the features cost no second forward.

# %%
TAPS, NEW_TOKENS = (0, 1), 40
prompts = [
    (f"{start}+{step}", "counting", [IDS[s] for s in f"{start}+{step}:"])
    for start in range(100)
    for step in range(1, 10)
]
prompts = [prompts[i] for i in rng.permutation(len(prompts))]
sizes = dict(rows=208, refill=208, max_new_tokens=NEW_TOKENS, size=128)
answers = list(regenerate(target, prompts[:416], TAPS, **sizes))
held_out, examples = answers[:32], answers[32:]
for example in held_out[:4]:
    print(spell(example.tokens))
print("features of the first one:", np.asarray(example.features).shape, "[T, C * D]")

# %% [markdown]
# ## A recipe
#
# `TrainConfig` is what a recipe's TOML file becomes; `draft_config` derives from it and the target the shape
# of the draft. Blocks of eight, so seven tokens are predicted at once, each weighted less than the one before it
# (`gamma`).

# %%
config = TrainConfig(
    run="counting", target_layer_ids=TAPS, num_hidden_layers=1, block_size=8, mask_token_id=IDS["?"], gamma=4.0,
    steps=400, warmup=20, learning_rate=4e-3, batch_size=16, anchors=8, sequence_size=SIZE, response_size=64,
    max_new_tokens=NEW_TOKENS, candidates=0, frequent=1, chunk=1024, decode_prompts=32,
)  # fmt: skip
module = DFlashDraftModel(draft_config(target, config))
setup = Setup(
    config, target, module, make_optimizer(config), examples, {"held out": held_out}, frequent_ids(examples, 1)
)  # fmt: skip
state = first_state(config, target, module.config, setup.optimizer, examples)
print(f"the draft has {sum(x.size for x in jax.tree.leaves(state.params)):,} parameters")

# %% [markdown]
# It does not start from noise: its layer is a copy of the target's last one, reading the
# target's last tap. Then it trains. A step takes sixteen answers and eight random anchors in each: at an anchor
# the draft is given the taps of all that stands before it, the anchor's token, and masks.

# %%
EVERY = 80
losses, evaluations = [], {0: evaluate_all(setup, state, decode=True)[0]}
for step in range(config.steps):
    state, metrics = one_step(setup, state, step)
    losses.append(metrics["loss"])
    if (step + 1) % EVERY == 0:
        evaluations[step + 1], decoded = evaluate_all(setup, state, decode=True)

# %% [markdown]
# ## Two ways to measure
#
# *Teacher-forced*: at random positions of held-out answers, how far does a block agree with the answer? *Decoded*:
# the decoder is run on the held-out prompts with the draft as it is, and its rounds are counted. The first is
# cheap, and weighs every position alike. The second is the truth: after a rejection a round begins where the text
# was hard, so hard places are met more often. The two belong close together, and a gap that opens is a
# bug's best-known sign: a mask that lets a block see what it should predict gives fine losses and no acceptance.

# %%
figure, axes = plt.subplots(1, 2)
axes[0].plot(losses, lw=0.5, color="#b9b9b9", ls="-", marker="", label="each step")
smooth = np.convolve(losses, np.ones(25) / 25, mode="valid")
axes[0].plot(np.arange(len(smooth)) + 12, smooth, ls="-", marker="", label="mean of 25")
axes[0].set(xlabel="step", ylabel="loss [nats, weighted]")
axes[0].legend()
for key, label in [("acceptance_length", "teacher-forced"), ("decoded", "decoded")]:
    axes[1].plot(evaluations.keys(), [e[key]["held out"] for e in evaluations.values()], label=label)  # fmt: skip
axes[1].set(xlabel="step", ylabel="tokens a round, held out", ylim=(1, None))
axes[1].legend()
plt.show()

# %% [markdown]
# ## What did it learn?
#
# The share of blocks that reach each slot, by what stands there. To name a digit several numbers ahead, the draft
# must do the additions that the target would have done in as many passes.

# %%
rows = zip(decoded["held out"].examples, decoded["held out"].rows)
tally = {"digit": np.zeros((2, 8)), "comma": np.zeros((2, 8))}
for _, row in rows:
    position = 1
    for taken in row.rounds:
        for slot in range(1, min(8, len(row.tokens) - position + 1)):
            kind = "comma" if SYMBOLS[row.tokens[position + slot - 1]] == "," else "digit"
            tally[kind][:, slot] += slot < taken, 1
        position += taken

figure, axis = plt.subplots(figsize=(5, 2.6))
for kind, (kept, seen) in tally.items():
    axis.plot(range(1, 8), kept[1:] / seen[1:], label=kind)
axis.set(xlabel="block slot", ylabel="share accepted", ylim=(0, 1))
axis.legend(title="the target's token")
plt.show()

# %% [markdown]
# ## Use it
#
# `export` writes a checkpoint in a public dialect, which `load_draft` reads like any other.

# %%
with tempfile.TemporaryDirectory() as folder:
    export(module.config, state, Path(folder) / "draft")
    draft = dj.load_draft(Path(folder) / "draft", target)
prompt = [IDS[symbol] for symbol in "37+6:"]
out = dj.generate(target, draft, [prompt], max_new_tokens=NEW_TOKENS)
plain = dj.generate(target, None, [prompt], max_new_tokens=NEW_TOKENS)
assert out.tokens == plain.tokens
ends = np.cumsum([1, *out.rounds[0]])
print("37+6:" + "|".join(spell(out.tokens[0][a:b]) for a, b in zip([0, *ends], ends)))
print(f"{len(plain.rounds[0])} passes of the target without it, {len(out.rounds[0])} with it")

# %% [markdown]
# ## Next
#
# On a real model the same is one command, which also resumes, ranks checkpoints and decodes samples:
#
#     python -m train.run train/recipes/smollm2.toml
#
# `train/config.py` lists what a recipe can say. [08_scale](08_scale.ipynb) runs steps like these on a mesh of
# eight devices.
