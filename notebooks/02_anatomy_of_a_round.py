# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2. Anatomy of a round
#
# A round of DFlash written out by hand, from the functions that the library's own loop runs: the
# block, who sees whom, what the target thinks of it, what is committed, and how two caches are
# rewound without a copy. At the end the hand-made rounds are compared with the compiled loop.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

import dflash_jax as dj
from dflash_jax.acceptance import num_accepted
from dflash_jax.decode import RUNNING, commit, decode, rewind
from dflash_jax.jobs import make_job
from dflash_jax.ops.mask import causal_mask, draft_mask
from dflash_jax.pair import load_tokenizer
from dflash_jax.sampling import Picker, argmax

plt.style.use("style.mplstyle")

target = dj.load_target()
draft = dj.load_draft(None, target)
tokenizer = load_tokenizer(target)


def show(ids):
    return [tokenizer.decode([int(i)]).replace("\n", "\\n").replace(" ", "·") for i in ids]


# %% [markdown]
# ## The state between two rounds
#
# `make_job` checks a call's arguments and binds the pair's modules to the functions that the decoder
# is handed: `models.target.forward`, `models.draft.propose`, and so on. `start` prefills. The first
# token of the answer is there then, since the last position of the prompt predicts it.

# %%
question = "Write a Python function that checks whether a word is a palindrome."
messages = [{"role": "user", "content": question}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

job = make_job(target, draft, [prompt], 64, None, dj.Sampling(), None, block_size=4)
models, params, Q = job.models, job.params, job.models.block_size
state = job.start([0])

print(f"{len(prompt)} tokens of prompt; length {int(state.length[0])}, so one token is new")
print(f"the target's cache holds {int(state.target.length[0])} positions,", end=" ")
print(f"the draft's {int(state.draft.length[0])}; both have {state.size} slots")
print("the anchor:", show(state.tokens[0, state.length[0] - 1 : state.length[0]]))

# %% [markdown]
# The newest token, the **anchor**, is in neither cache: nobody has read it yet. This is the invariant
# of the whole decoder. Both caches hold positions `0 .. length-2`, and slot and position are the same
# number.
#
# The two caches hold different things. The target's has keys and values of its own layers. The
# draft's has keys and values that the draft's layers make of the *target's hidden states* at a few
# layers, the taps. So the draft never reads the text; it reads what the target thought of it.

# %%
c = draft.config
print(f"taps after layers {c.target_layer_ids} of {target.config.num_hidden_layers}")
print(f"target: {len(state.target.k)} layers of {state.target.k[0].shape}  [B, K, S, H]")
print(f"draft:  {len(state.draft.k)} layers of {state.draft.k[0].shape}")

# %% [markdown]
# ## The block, and who sees whom
#
# Here `Q` is 4. The draft gets the anchor and `Q - 1` mask tokens, and answers all of them in one forward. Its layers
# let each slot see the whole context and, unless they are causal, the whole block: a slot may look at
# the slots behind it, which an autoregressive model never could. The target then reads the anchor and the
# proposals, causally as ever.

# %%
length = state.length - 1  # of both caches, and the anchor's position
shown = int(length[0]) + Q + 4
held = jnp.arange(shown)[None]
layouts = sorted({(c.window(i) or 0, c.causal(i)) for i in range(c.num_hidden_layers)})
positions = length[:, None] + jnp.arange(Q)[None]
panels = {
    f"draft, {'causal' if causal else 'both ways'} inside the block"
    + (f", window {window}" if window else ""): draft_mask(
        length, held, Q, window or None, causal, c.window_rule
    )
    for window, causal in layouts
} | {"target": causal_mask(positions, shown)}

figure, axes = plt.subplots(len(panels), figsize=(7, 1.35 * len(panels) + 0.4), sharex=True)
for axis, (name, mask) in zip(axes, panels.items()):
    seen = np.asarray(mask[0]).T.astype(int)
    inside = (np.arange(shown) >= int(length[0]))[None]
    axis.imshow(
        seen * (1 + inside), cmap=ListedColormap(["w", "#b9cfe0", "#17324d"]), vmax=2, aspect="auto"
    )
    axis.set(title=name, ylabel="block slot", yticks=range(0, Q, 2 if Q > 4 else 1))
    axis.set_xticks(np.arange(shown + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(Q + 1) - 0.5, minor=True)
    axis.grid(False, which="major")
    axis.grid(which="minor", lw=0.3)
    axis.tick_params(which="minor", length=0)
axes[-1].set_xlabel("cache slot = position")
handles = [Patch(color="#b9cfe0"), Patch(color="#17324d"), Patch(fc="w", ec="0.6")]
figure.legend(
    handles, ["sees, context", "sees, block", "hidden"], loc="outside lower left", ncols=3
)
plt.show()

# %% [markdown]
# ## A round by hand
#
# Four jitted pieces and some arithmetic. `propose` runs the draft; `read` runs the target over
# the block; `extend` projects the taps of the positions that the target has just read into the
# draft's cache. `commit` appends tokens, and `rewind` sets both caches' lengths.


# %%
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


def one_round(state):
    """The state after a round, and what there was to see on the way."""
    proposals, draft_cache = propose(params, state)
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    block = jnp.concatenate([anchor, proposals.tokens], axis=1)
    predicted, context, target_cache = read(params, block, state.target)
    accepted = num_accepted(proposals.tokens, predicted)
    draft_cache = extend(params, context, draft_cache)
    before = state.length
    state = state.replace(target=target_cache, draft=draft_cache)
    state = rewind(commit(state, predicted, accepted, state.finish == RUNNING))
    return state, (int(before[0]), np.asarray(block[0]), np.asarray(predicted[0]), int(accepted[0]))


# %% [markdown]
# The target's prediction *after* slot k is compared with the proposal *in* slot k + 1. While they are
# equal the proposals are what the target would have said; at the first difference, the target's own
# token is right there, computed already. That is why a round commits at least one token.

# %%
state, (start, block, predicted, accepted) = one_round(state)
print("block     ", show(block))
print("target    ", ["", *show(predicted)])
print(f"accepted   {accepted}, and {show(predicted[accepted : accepted + 1])} of the target's own")
print(
    f"length     {start} -> {int(state.length[0])}; both caches hold {int(state.target.length[0])}"
)

# %% [markdown]
# ## Several rounds
#
# Each line is a round. The anchor is on the left; of the proposals, the dark ones were accepted, the
# first wrong one is struck out with the target's own token below it, and whatever stood behind it was
# never judged. (A dot is a space.) If all are right, the target adds one at the end.

# %%
ROUNDS = 8
history = [(start, block, predicted, accepted)]
while len(history) < ROUNDS:
    state, seen = one_round(state)
    history.append(seen)

figure, axis = plt.subplots(figsize=(min(7, 1.2 * Q + 1.6), 0.5 * ROUNDS + 0.5))
axis.axis("off")
axis.set(xlim=(-0.7, Q + 1), ylim=(ROUNDS, -0.4))
for r, (_, block, predicted, accepted) in enumerate(history):
    axis.text(-0.1, r + 0.36, f"{r + 1}", ha="right", va="center", color="0.4")
    own = show(predicted[accepted : accepted + 1])[0]
    for slot, text in enumerate(show(block)):
        kept, wrong = 0 < slot <= accepted, slot == accepted + 1
        face = "w" if slot == 0 else "#17324d" if kept else "#ececec"
        axis.add_patch(Rectangle((slot, r), 0.94, 0.72, fc=face, ec="k" if slot == 0 else "0.75"))
        ink = "w" if kept else "k" if slot == 0 else "0.45"
        height = r + (0.2 if wrong else 0.36)
        axis.text(slot + 0.47, height, text[:14], ha="center", va="center", size=7.5, color=ink)
        if wrong:
            axis.plot(
                [slot + 0.15, slot + 0.8], [height] * 2, color="0.45", lw=0.8, ls="-", marker=""
            )
    at = accepted + 1
    axis.text(at + 0.47, r + (0.52 if at < Q else 0.36), own[:14], ha="center", va="center", size=7.5, weight="bold", color="#c8553d")  # fmt: skip
for slot in range(Q + 1):
    name = "anchor" if slot == 0 else f"slot {slot}" if slot < Q else "one more"
    axis.text(slot + 0.47, -0.25, name, ha="center", size=7.5, color="0.4")
axis.text(-0.1, -0.25, "round", ha="right", size=7.5, color="0.4")
plt.show()

# %% [markdown]
# ## The caches
#
# In every round both caches get `Q` new rows behind what they hold. Then the length moves on by the tokens
# that were committed, and that is the rewind: rejected rows are still there, but no mask lets
# anybody see them, and the next round writes over them. (The target's cache is drawn. The draft's
# moves in the same way, with rows for the taps.)

# %%
figure, axis = plt.subplots(figsize=(7, 2.6))
first = history[0][0] - 1 - 4
for r, (length, _, _, accepted) in enumerate(history, 1):
    held, kept = length - 1, accepted + 1
    axis.barh(r, held - first, left=first, color="#b9cfe0", height=0.7)
    axis.barh(r, kept, left=held, color="#17324d", height=0.7)
    axis.barh(r, Q - kept, left=held + kept, fc="w", ec="0.5", hatch="////", height=0.7)
axis.set(xlabel="cache slot = position", ylabel="round", yticks=range(1, ROUNDS + 1), ylim=(ROUNDS + 0.6, 0.4))  # fmt: skip
axis.grid(axis="y", visible=False)
handles = [Patch(color="#b9cfe0"), Patch(color="#17324d"), Patch(fc="w", ec="0.5", hatch="////")]
labels = ["held before", "written and kept", "written and left as scratch"]
figure.legend(handles, labels, loc="outside upper left", ncols=3)
plt.show()

# %% [markdown]
# Is the scratch really out of sight? Fill it with large numbers, in all layers of both caches, and run the
# next round twice.


# %%
def spoiled(cache):
    scratch = jnp.arange(cache.size)[None, None, :, None] >= cache.length[:, None, None, None]
    return jax.tree.map(lambda x: jnp.where(scratch, 1e4, x) if x.ndim == 4 else x, cache)


_, clean = one_round(state)
_, other = one_round(state.replace(target=spoiled(state.target), draft=spoiled(state.draft)))
assert all(np.array_equal(a, b) for a, b in zip(clean, other))

# %% [markdown]
# ## The same, compiled
#
# `decode` runs such rounds in one `lax.while_loop` on the device, with the state donated, so that the
# caches are updated in place and the host hears nothing until it ends. From the same start it must
# have come to the same tokens.

# %%
compiled = decode(models, params, job.start([0]), np.int32(ROUNDS))
assert int(compiled.length[0]) == int(state.length[0])
assert np.array_equal(*(s.tokens[0, : int(s.length[0])] for s in (compiled, state)))
print("tokens by round:", compiled.committed[0, :ROUNDS])
print("".join(tokenizer.decode(state.tokens[0, len(prompt) : int(state.length[0])])))

# %% [markdown]
# ## Next
#
# [03_rope_in_float32](03_rope_in_float32.ipynb) is about a fault that none of this would have shown:
# the text stays right, and only `accepted` falls. [04_lossless](04_lossless.ipynb) replaces the
# comparison of two argmaxes by sampling. The loop itself is `dflash_jax/decode.py`, which fits on
# a few screens.
