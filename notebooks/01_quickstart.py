# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Quickstart
#
# Load a language model and its DFlash draft, let them answer, and read from the result how many of
# the answer's tokens came for free. At the end you have a picture of where in a text speculation
# works, and you know the four calls that make up the public interface.

# %%
import jax
import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

import dflash_jax as dj
from dflash_jax.pair import load_tokenizer

plt.style.use("style.mplstyle")

# %% [markdown]
# ## Load a pair
#
# `load_target` takes a hub id, a folder, an Orbax checkpoint or a GGUF file; without a name it is the
# embedded SmolLM2-135M-Instruct. `load_draft` checks that the draft belongs to the target: its
# width, its vocabulary, its mask token and the target's layers that it reads (the *taps*).

# %%
target = dj.load_target()
draft = dj.load_draft(None, target)
tokenizer = load_tokenizer(target)

for name, model in [("target", target), ("draft", draft)]:
    size = sum(x.size for x in jax.tree.leaves(model.params))
    print(f"{name}: {size / 1e6:.1f}M parameters, {model.config.num_hidden_layers} layers")
print(f"the draft reads layers {draft.config.target_layer_ids} of the target")
print(f"and was trained to propose up to {draft.config.max_proposals} tokens at once")

# %% [markdown]
# ## Generate
#
# The library speaks token ids; text is the tokenizer's business. A round works on a *block*: the newest token and
# the draft's proposals. On a CPU a short block pays best ([notebook 7](07_speed.ipynb) says why), so we ask for four
# slots, which is one token and three proposals.

# %%
question = "Write a Python function that checks whether a word is a palindrome."
messages = [{"role": "user", "content": question}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

out = dj.generate(target, draft, [prompt], max_new_tokens=96, block_size=4)
tokens, rounds = out.tokens[0], out.rounds[0]
print(tokenizer.decode(tokens, skip_special_tokens=True))

# %% [markdown]
# The same call without a draft is plain autoregressive decoding. Its tokens are the same, all of
# them: a draft decides how soon a token is there, never which one it is.

# %%
plain = dj.generate(target, None, [prompt], max_new_tokens=96)
assert plain.tokens == out.tokens

# %% [markdown]
# ## What it cost
#
# A *round* is one pass of the target. It reads a block, the newest token and the draft's proposals,
# and commits the proposals that it agrees with, and one token of its own behind them. The mean
# number of tokens that a round commits is the *acceptance length*, tau. (The first token comes
# from the prefill and belongs to no round.)

# %%
print(f"{len(tokens)} tokens, ended by {out.finish[0]!r}")
print(f"passes of the target: {len(plain.rounds[0])} plain, {len(rounds)} with the draft")
print(f"acceptance length {out.acceptance_length:.2f}")
print("tokens by round:", rounds)

# %% [markdown]
# Where are the cheap tokens? Below, what is tinted was proposed by the draft and accepted; what is
# not is the token that each round's pass of the target gave. The tint changes from round to round,
# so a long tinted stretch is one pass that went well.

# %%
WIDTH, SIZE = 84, 9.6  # columns, and the font size that makes them 7 inches wide
TINTS = ["#94bbdb", "#f7dccb"]


def draw(tokens, rounds, tokenizer):
    """The text in a fixed-width font, accepted tokens on a tint."""
    owners = [(None, 1)] + [(r, count) for r, count in enumerate(rounds)]
    spans, column, line, position = [], 0, 0, 0
    for owner, count in owners:
        for i, token in enumerate(tokens[position : position + count]):
            accepted = owner is not None and i < count - 1
            text = tokenizer.decode([token])
            if column + len(text) > WIDTH:
                column, line, text = 0, line + 1, text.lstrip(" ")
            for character in text:
                if character == "\n":
                    column, line = 0, line + 1
                if character != "\n":
                    spans.append((column, line, character, TINTS[owner % 2] if accepted else None))
                    column += 1
        position += count
    height = line + 1
    axes = plt.figure(figsize=(7, 0.19 * height), layout="none").add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    for column, line, character, tint in spans:
        if tint:
            axes.add_patch(Rectangle((column, line + 0.08), 1.02, 0.88, color=tint, lw=0))
        axes.text(column, line + 0.75, character, family="monospace", size=SIZE)
    handles = [Patch(color=TINTS[0]), Patch(color=TINTS[1]), Patch(fc="none", ec="0.6")]
    labels = ["accepted, even rounds", "accepted, odd rounds", "the target's own"]
    axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(0, -0.03), ncols=3)


draw(tokens, rounds, tokenizer)
plt.show()

# %% [markdown]
# ## Stream
#
# `stream` yields the tokens as they are committed: a piece a round.

# %%
for piece in dj.stream(target, draft, prompt, max_new_tokens=24, block_size=4):
    print(repr(tokenizer.decode(piece)))

# %% [markdown]
# ## Sample
#
# With a temperature, the target's tokens are draws from its filtered distribution, made with noise
# that depends on the key and the position alone. So sampled text, too, is the same with any draft,
# or with none ([notebook 4](04_lossless.ipynb) tests this, and the distribution). Prompts of any
# lengths go through together, and each may have its own settings.

# %%
warm = dj.Sampling(temperature=0.8, top_p=0.9)
sampled = dj.generate(
    target, draft, [prompt], max_new_tokens=24, block_size=4, sampling=warm, key=jax.random.key(7)
)
print(tokenizer.decode(sampled.tokens[0]))

# %% [markdown]
# ## Go on
#
# A kept state is the two models' caches. The next turn of a conversation goes on from it, and
# nothing that was read is read again. (The answer ended with its stop token, which is part of it.)

# %%
turns = ["<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"]
turns += ["\n<|im_start|>user\nAnd of Italy?<|im_end|>\n<|im_start|>assistant\n"]
state = None
for turn in turns:
    answer = dj.generate(
        target, draft, [tokenizer.encode(turn)], max_new_tokens=24, block_size=4, state=state, keep_state=True
    )  # fmt: skip
    state = answer.state
    print(tokenizer.decode(answer.tokens[0], skip_special_tokens=True))

# %% [markdown]
# ## Next
#
# [02_anatomy_of_a_round](02_anatomy_of_a_round.ipynb) opens the loop and looks at a round's parts;
# [07_speed](07_speed.ipynb) asks when all this is faster, which is another question than how many
# tokens are accepted.
