"""Tiny random models, and a draft whose proposals a test dictates."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_jax.adapters import DraftModel, TargetModel
from dflash_jax.cache import read_rows
from dflash_jax.checkpoint import keys
from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig
from dflash_jax.decode import RUNNING, Models, State, decode, prefill
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.models.transformer import Transformer
from dflash_jax.pair import Draft, Target
from dflash_jax.states import new_draft_cache, new_state

VOCAB = 64
MANY_ROUNDS = np.int32(1000)
CHUNK = 16
OWN, REPEAT = -1, -2  # script entries: the draft's own proposal; the anchor again

TARGET = TargetConfig(
    model_type="qwen3", hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, vocab_size=VOCAB, max_position_embeddings=512, rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4), qk_norm=True,
)  # fmt: skip
DRAFT = DraftConfig(
    hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, vocab_size=VOCAB, max_position_embeddings=512, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e5),
    qk_norm=True, block_size=16, mask_token_id=33, target_layer_ids=(0, 2), num_target_layers=3,
)  # fmt: skip


def random_params(config: TargetConfig | DraftConfig, seed: int, dtype=jnp.float32):
    """Parameters with norms and biases away from their usual start.

    Sharp attention keeps greedy texts from falling into a loop of one token.
    """
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        if path == "d2t":
            return jnp.zeros(shape, jnp.int32)
        x = rng.standard_normal(shape)
        if len(shape) == 1:
            x = 0.2 * x + (0.0 if path.endswith("bias") else 1.0)
            x = 4 * x if path.endswith("q_norm/weight") else x
        else:
            x = x / shape[-1] ** 0.5
        return jnp.asarray(x, dtype)

    return keys.nest({path: draw(path, s) for path, s in keys.expected_shapes(config).items()})


def assemble(tensors, expected, source, dtype=None):
    """The tree of a checkpoint's tensors, as loading builds it."""
    return keys.build(keys.stream(tensors, expected, source, dtype), expected)


def assemble_draft(tensors, config, source, dtype=None):
    leaves = keys.stream_draft(tensors, config, source, dtype)
    return keys.build(leaves, keys.expected_shapes(config))


def random_target(config: TargetConfig = TARGET, seed: int = 0, dtype=jnp.float32) -> Target:
    return Target(config, random_params(config, seed, dtype), (), source=Path())


def random_draft(config: DraftConfig = DRAFT, seed: int = 1, dtype=jnp.float32) -> Draft:
    return Draft(config, random_params(config, seed, dtype), source=Path())


def simulated(devices: int) -> str:
    """XLA's flags of a process with so many devices, behind the ones that it would have anyway."""
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"


def byte_tokenizer(
    template: str | None = None, extra: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, 256 ids, and then the `extra` tokens."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *extra]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = template
    return wrapped


@dataclasses.dataclass(frozen=True)
class ScriptedDraft(DraftModel):
    """A real draft, with its cache, that proposes `params["script"][b, p]` for position p of row b.

    The entry `OWN` stands for what it would have proposed itself, `REPEAT` for the anchor.
    """

    def propose(self, params, text, cache, block_size, pick):
        own, cache = super().propose(params, text, cache, block_size, pick)
        script = read_rows(params["script"], cache.length + 1, block_size - 1)
        script = jnp.where(script == REPEAT, read_rows(text, pick.anchor, 1), script)
        return own._replace(tokens=jnp.where(script == OWN, own.tokens, script)), cache


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Binds a target, and maybe a draft, to the decoder's functions."""

    target: Target
    draft: Draft | None = None
    block_size: int = 1

    @property
    def models(self) -> Models:
        if self.draft is None:
            return Models(TargetModel(Transformer(self.target.config)), None, 1)
        c = self.draft.config
        model = TargetModel(Transformer(self.target.config, c.target_layer_ids, c.last_tap))
        return Models(model, ScriptedDraft(DFlashDraftModel(c), model), self.block_size)

    def params(self, script=None):
        if self.draft is None:
            return {"target": self.target.params}
        return {"target": self.target.params, "draft": self.draft.params, "script": script}

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        stop_token_ids: Sequence[int] = (),
        size: int = 128,
    ) -> State:
        """The state after prefill."""
        state = new_state(self.target, prompts, max_new_tokens, stop_token_ids, size)
        return self.prefill(state)

    def prefill(self, state: State) -> State:
        if self.draft is not None and state.draft is None:
            rows = len(state.length)
            state = state.replace(draft=new_draft_cache(self.draft, rows, state.size))
        script = None if self.draft is None else own_script(state)
        models = self.models
        return prefill(models.target, models.draft, self.params(script), state, chunk=CHUNK)

    def decode(self, state: State, script=None, max_rounds=MANY_ROUNDS) -> State:
        """One call of `decode`; `script` defaults to the draft's own proposals."""
        if self.draft is not None and script is None:
            script = own_script(state)
        return decode(self.models, self.params(script), state, np.int32(max_rounds))

    def run(self, *args, script=None, **options) -> State:
        """Prefill, then decoding to the end without growth."""
        state = self.decode(self.start(*args, **options), script)
        assert np.all(np.asarray(state.finish) != RUNNING)
        return state


def own_script(state: State):
    return jnp.full((len(state.length), 2 * state.size), OWN, jnp.int32)


def script_of(rows: Sequence[Sequence[int]], size: int = 256):
    """A script from each row's tokens, prompt included; the draft's own proposals beyond them."""
    script = np.full((len(rows), size), OWN, np.int32)
    for line, row in zip(script, rows):
        line[: len(row)] = row
    return jnp.asarray(script)


def rows_of(state: State) -> list[list[int]]:
    """Each row's committed tokens, prompt included."""
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    return [t[:n].tolist() for t, n in zip(tokens, length)]


def new_tokens(state: State, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [row[len(prompt) :] for row, prompt in zip(rows_of(state), prompts)]


def rounds_of(state: State) -> list[list[int]]:
    """Tokens that each row committed in each of its rounds."""
    committed, rounds = np.asarray(state.committed), np.asarray(state.rounds)
    return [c[:n].tolist() for c, n in zip(committed, rounds)]


def live(cache, row: int) -> list[np.ndarray]:
    """A row's keys and values in the slots that count, as float32."""
    n = int(cache.length[row])
    return [np.asarray(x)[row, :, :n].astype(np.float32) for x in (*cache.k, *cache.v)]


def prompts_of(*lengths: int, seed: int = 3, vocab: int = VOCAB) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(vocab, size=n).tolist() for n in lengths]


def leaves_equal(a, b) -> bool:
    return all(
        np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
