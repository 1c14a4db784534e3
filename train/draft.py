"""The draft that a recipe trains: its config, its first parameters, and its checkpoint for decoding."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from dflash_jax.checkpoint.export import save_draft
from dflash_jax.config import DraftConfig, RopeConfig
from dflash_jax.pair import Target, load_draft
from train.config import TrainConfig
from train.optimizer import trained_params
from train.step import TrainState
from train.store import Example
from train.warm_start import feature_scale, fold_scale, random_params, warm_start


def draft_config(target: Target, config: TrainConfig) -> DraftConfig:
    """A draft of the target's own shape, with Qwen3's query and key norms."""
    c = target.config
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
    """Step 0: the recipe's draft, or the target's last layers as one; AdamW's moments at zero.

    Raises:
        ValueError: If the recipe's draft has another shape than the recipe says.
    """
    width = len(draft.target_layer_ids) * draft.hidden_size
    taps = [dataclasses.replace(e, features=e.features[:, :width]) for e in examples[:64]]
    scale = feature_scale(taps)
    if config.init:
        start = load_draft(config.init, target, dtype="float32")
        if start.config != draft:
            raise ValueError(
                f"init={config.init!r} is {start.config}, but the recipe describes {draft}"
            )
        params = fold_scale(start.params, 1 / scale)
    else:
        random = random_params(draft, jax.random.key(config.seed))
        params = warm_start(random, target.params, draft, scale, taps)
    moments = optimizer.init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, moments, jnp.asarray(scale))


def export(draft: DraftConfig, state: TrainState, folder: Path) -> None:
    """Writes the draft in the flat Hugging Face dialect, bfloat16, in the place of an older one."""
    new, old = (folder.with_name(f"{folder.name}.{end}") for end in ("new", "old"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    params = trained_params(state.params, state.opt_state)
    save_draft(new, draft, fold_scale(params, state.feature_scale))
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
