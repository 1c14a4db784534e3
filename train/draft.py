"""The draft that a recipe trains: its config, its first parameters, and its checkpoint for decoding."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from dflash_jax.checkpoint.export import Dialect, save_draft
from dflash_jax.checkpoint.orbax import Header
from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig
from dflash_jax.pair import Target, check_pair, load_draft
from train.config import TrainConfig
from train.init import init_config
from train.optimizer import trained_params
from train.step import TrainState
from train.store import Example
from train.warm_start import feature_scale, fold_scale, random_params, warm_start


def draft_config(target: Target | Header[TargetConfig], config: TrainConfig) -> DraftConfig:
    """The shape of the recipe's `init`; without one the target's own, with Qwen3's query and key norms.

    Args:
        target: A whole one is not needed: its parameters are not looked at.
        config: The recipe.

    Raises:
        ValueError: If the recipe's keys contradict its `init`, that cannot be read, or the draft would
            not be one for the target.
    """
    c = target.config
    draft = init_config(vars(config), c.num_hidden_layers) if config.init else _like(c, config)
    check_pair(c, target.stop_token_ids, draft, target.pad_token_id)
    return draft


def _like(c: TargetConfig, config: TrainConfig) -> DraftConfig:
    return DraftConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=c.rope.theta),
        qk_norm=True,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.target_layer_ids,
        num_target_layers=c.num_hidden_layers,
    )


def first_state(
    config: TrainConfig,
    target: Target,
    draft: DraftConfig,
    optimizer: optax.GradientTransformation,
    examples: Sequence[Example],
) -> TrainState:
    """Step 0: the recipe's draft, or the target's last layers as one; the optimiser's moments at zero.

    Raises:
        ValueError: If the recipe's draft is another target's.
    """
    width = len(draft.target_layer_ids) * draft.hidden_size
    taps = [dataclasses.replace(e, features=e.features[:, :width]) for e in examples[:64]]
    scale = feature_scale(taps)
    if config.init:
        ids = draft.target_layer_ids
        start = load_draft(config.init, target, target_layer_ids=ids, dtype="float32")
        params = fold_scale(start.params, 1 / scale)
    else:
        random = random_params(draft, jax.random.key(config.seed))
        params = warm_start(random, target.params, draft, scale, taps)
    moments = optimizer.init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, moments, jnp.asarray(scale))


def dialect_of(draft: DraftConfig) -> Dialect:
    """The dialect to write a draft in: the flat one, which every consumer reads, where it says the draft's window rule."""
    return "speculators" if draft.window_rule == "speculators" else "zlab"


def export(draft: DraftConfig, state: TrainState, folder: Path) -> None:
    """Writes the draft for Hugging Face, bfloat16, in the place of an older one."""
    new, old = (folder.with_name(f"{folder.name}.{end}") for end in ("new", "old"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    params = trained_params(state.params, state.opt_state)
    save_draft(new, draft, fold_scale(params, state.feature_scale), dialect=dialect_of(draft))
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
