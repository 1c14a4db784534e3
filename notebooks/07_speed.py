# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. Speed
#
# An acceptance length of two does not halve the time: a pass over a block costs more than a pass over a token, and the draft
# costs something too. This notebook measures the parts on the embedded pair, puts them into a model of one line, and asks
# when DFlash cannot help.

# %%
import time
from collections import Counter

import jax
import matplotlib.pyplot as plt
import numpy as np

import dflash_jax as dj
from dflash_jax.bench import read_prompts
from dflash_jax.jobs import make_job
from dflash_jax.pair import load_tokenizer
from dflash_jax.sampling import Picker, argmax

plt.style.use("style.mplstyle")

target = dj.load_target()
draft = dj.load_draft(None, target)
tokenizer = load_tokenizer(target)

# %% [markdown]
# ## Five prompts, both ways
#
# Some of the kinds that the draft was trained on, and one each of HumanEval, GSM8K and MT-bench. Plain decoding is the same loop
# without a draft. Both ways run once before the clock starts, since the first call compiles.

# %%
SETS = ("held_out", "held_out", "humaneval", "gsm8k", "mtbench")
NUMBERS = (2, 30, 0, 0, 5)
names = [f"{name} {number}" for name, number in zip(SETS, NUMBERS)]


def encode(text):
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


prompts = [encode(read_prompts(name)[number]) for name, number in zip(SETS, NUMBERS)]
WAYS = {"plain": {"draft": None}, "DFlash": {"draft": draft, "block_size": 4}}


def run(way, prompt, max_new_tokens=40):
    start = time.perf_counter()
    out = dj.generate(target, prompts=[prompt], max_new_tokens=max_new_tokens, **WAYS[way])
    return out, time.perf_counter() - start


longest = max(prompts, key=len)
for way in WAYS:
    run(way, longest, 2)
outs, seconds = {}, {}
for name, prompt in zip(names, prompts):
    for way in WAYS:
        outs[name, way], seconds[name, way] = run(way, prompt)
    assert outs[name, "plain"].tokens == outs[name, "DFlash"].tokens

# %% [markdown]
# ## How many tokens a round commits
#
# The mean, tau, hides a wide spread: many rounds get the least there is, one token, and some fill the block.

# %%
committed = Counter(n for name in names for n in outs[name, "DFlash"].rounds[0])
rounds = sum(committed.values())
figure, axis = plt.subplots(figsize=(5, 2.6))
axis.bar(
    list(committed), [100 * n / rounds for n in committed.values()], color="#6fa3c8", width=0.6
)
axis.set(xlabel="tokens committed by a round", ylabel="rounds [%]", xticks=range(1, 5))
axis.grid(axis="x", visible=False)
plt.show()
print(f"{rounds} rounds, tau {sum(n * k for n, k in committed.items()) / rounds:.2f}")

# %% [markdown]
# ## What a round costs
#
# A round is the target over a block, the draft over a block, and a projection of the taps. Each is timed by itself, as in
# [notebook 2](02_anatomy_of_a_round.ipynb).

# %%
job = make_job(target, draft, prompts[:1], 64, None, dj.Sampling(), None, block_size=4)
models, params, Q = job.models, job.params, job.models.block_size
state = job.start([0])


@jax.jit
def propose(params, state):
    pick = Picker(state.sampling, state.length - 1, "coupled")
    return models.draft.propose(params, state.tokens, state.draft, Q, pick)


@jax.jit
def read(params, block, cache):
    hidden, context, cache = models.target.forward(params, block, cache)
    return argmax(models.target.logits(params, hidden)), context, cache


@jax.jit
def extend(params, context, cache):
    return models.draft.extend(params, context, cache)


def clock(function, *args, times=8):
    jax.block_until_ready(function(*args))
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


block = state.tokens[:, :Q]
_, context, _ = read(params, block, state.target)
t_verify = clock(read, params, block, state.target)
t_draft = clock(propose, params, state) + clock(extend, params, context, state.draft)
passes = {name: len(outs[name, "plain"].rounds[0]) for name in names}
t_plain = float(np.median([seconds[name, "plain"] / passes[name] for name in names]))
print(f"a token, plain  {1e3 * t_plain:5.1f} ms")
print(f"a block of {Q}: verify {1e3 * t_verify:5.1f} ms, draft {1e3 * t_draft:5.1f} ms")

# %% [markdown]
# ## The model
#
# A round yields tau tokens, each of which plain decoding would have taken a pass for. So
#
# $$ \text{speed-up} = \tau \cdot \frac{t_\text{plain}}{t_\text{verify} + t_\text{draft}}, $$
#
# a line through the origin. It crosses 1 at the acceptance length below which a draft is a loss.

# %%
slope = t_plain / (t_verify + t_draft)
tau = {name: outs[name, "DFlash"].acceptance_length for name in names}
speedup = {name: seconds[name, "plain"] / seconds[name, "DFlash"] for name in names}
figure, axis = plt.subplots(figsize=(5.5, 3.2))
line = np.array([1, Q])
axis.axhspan(0, 1, color="0.94")
axis.plot(line, slope * line, marker="", color="k", lw=1, label="model")
for i, name in enumerate(names):
    axis.plot(
        tau[name], speedup[name], ls="", marker="osD^v"[i], ms=6, color=f"C{i % 4}", label=name
    )
axis.set(xlabel="acceptance length, tokens a round", ylabel="speed-up over plain", ylim=(0, None))
axis.text(Q, 0.05, "slower than plain", ha="right", color="0.35")
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
print(f"break-even at {1 / slope:.2f} tokens a round; a full block gives {Q * slope:.2f} times")

# %% [markdown]
# Points lie off the line where the clock says something else than the parts do: the prefill is in the calls and not in the
# model, and a machine with other work on it has a mood.
#
# ## Where DFlash cannot help
#
# The model names the cases.
#
# - **The draft knows too little.** Left of the break-even nothing else matters. Open chat is such a text for the embedded
#   draft, which is small and was trained for hours, not days. `--adapt-width` narrows the block there.
# - **The target is not much slower than the draft.** The target here has 30 thin layers; the draft's few, and the head over
#   the vocabulary, which both need, are a good part of that. A target of 8 billion parameters makes $t_\text{draft}$ small
#   beside it.
# - **A block costs what its tokens cost.** On an accelerator at batch 1, weights are read once whatever the block, and
#   $t_\text{verify}$ is about $t_\text{plain}$. A CPU, or a large batch, is busy with arithmetic already, and there each
#   slot of a block is paid for. That is why blocks of four beat blocks of eight on this machine, while published drafts use
#   sixteen on a GPU.
# - **High temperature.** If the target hardly knows what it will say, nobody can guess it. The README has acceptance by
#   temperature.
#
# ## Next
#
# `dflash-jax bench` measures all this on any pair and set of prompts, with acceptance by context length. To move the points to
# the right, train: [06_train_a_draft](06_train_a_draft.ipynb). More devices: [08_scale](08_scale.ipynb).
