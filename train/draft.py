"""The draft that a recipe trains: its config, its first parameters, and its checkpoint for decoding."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflash_jax.checkpoint import orbax
from dflash_jax.checkpoint.export import DIALECTS, Dialect, draft_json, save_draft
from dflash_jax.checkpoint.orbax import Header
from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig
from dflash_jax.pair import Target, check_pair, load_draft
from dflash_jax.sharding import DRAFT, gathered, place
from train.config import TrainConfig
from train.init import grown, init_config
from train.mesh import is_first
from train.optimizer import trained_params
from train.step import TrainState, whole
from train.store import Example
from train.vocabulary import count_tokens, frequent_vocabulary, offsets
from train.warm_start import feature_scale, fold_scale, random_params, warm_start, with_start

_MAYBE_SAID = (
    "layer_types", "sliding_window", "is_causal", "window_rule", "sample_from_anchor", "head", "draft_vocab_size",
    "own_embedding", "own_head",
)  # fmt: skip


def draft_config(target: Target | Header[TargetConfig], config: TrainConfig) -> DraftConfig:
    """The shape of the recipe's `init` and what it adds; without one the target's own, with Qwen3's query and key norms.

    Args:
        target: A whole one is not needed: its parameters are not looked at.
        config: The recipe.

    Raises:
        ValueError: If the recipe's keys contradict its `init`, that cannot be read, or the draft would
            not be one for the target.
    """
    c = target.config
    if config.init:
        draft, unsaid = init_config(vars(config), c.num_hidden_layers), TrainConfig(run=config.run)
        said = [k for k in _MAYBE_SAID if getattr(config, k) != getattr(unsaid, k)]
        if said:
            described = vars(_like(c, config))
            draft = grown(config.init, draft, {k: described[k] for k in said})
    else:
        draft = _like(c, config)
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
        layer_types=config.layer_types,
        sliding_window=config.sliding_window or None,
        is_causal=config.is_causal,
        window_rule=config.window_rule,
        sample_from_anchor=config.sample_from_anchor,
        head=config.draft_head,
        draft_vocab_size=config.draft_vocab_size or None,
        own_embedding=config.own_embedding,
        own_head=config.own_head,
    )


def draft_vocabulary(target: Target, draft: DraftConfig, examples: Sequence[Example]) -> np.ndarray:
    """The ids that a draft with a reduced vocabulary gets: the stop ids and the responses' most frequent."""
    responses = (e.tokens[e.supervised] for e in examples)
    counts = count_tokens(responses, draft.vocab_size)
    assert draft.draft_vocab_size is not None
    return frequent_vocabulary(counts, draft.draft_vocab_size, target.stop_token_ids)


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
    start = None
    if config.init:
        taps_of_it = draft.target_layer_ids
        start = load_draft(config.init, target, target_layer_ids=taps_of_it, dtype="float32")
    if start is not None and start.config == draft:
        params = fold_scale(start.params, 1 / scale)
        d2t = params.pop("d2t", None)
    else:
        params = random_params(draft, jax.random.key(config.seed))
        reduced = params.pop("d2t", None) is not None
        ids = draft_vocabulary(target, draft, examples) if reduced else None
        params = warm_start(params, target.params, draft, scale, taps, ids)
        d2t = None if ids is None else jnp.asarray(offsets(ids))
        if start is not None:
            params = with_start(params, fold_scale(start.params, 1 / scale), d2t)
    rules = DRAFT.of(draft)
    params = place(params, rules)
    moments = optimizer.init(params)
    state = TrainState(jnp.zeros((), jnp.int32), params, moments, jnp.asarray(scale), d2t)
    return place(state, rules)


def export(draft: DraftConfig, state: TrainState, folder: Path) -> None:
    """Writes the draft, as `write_draft` does, in the place of an older one.

    Every process must call it; the first one writes.
    """
    params = trained_params(state.params, state.opt_state)
    params = gathered(whole(fold_scale(params, state.feature_scale), state.d2t))
    if not is_first():
        return
    new, old = (folder.with_name(f"{folder.name}.{end}") for end in ("new", "old"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    write_draft(new, draft, params)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def write_draft(folder: Path, draft: DraftConfig, params: Any) -> None:
    """Writes a draft in bfloat16: in the first Hugging Face dialect that can say all of it, or in Orbax's form.

    A reduced vocabulary is speculators' to say, and a head on top of it or a scaled head nobody's.
    """
    dialect = _dialect(draft)
    if dialect is not None:
        return save_draft(folder, draft, params, dialect=dialect)
    params = {k: v if k == "d2t" else jax.tree.map(lambda x: x.astype(jnp.bfloat16), v) for k, v in params.items()}  # fmt: skip
    return orbax.save(folder, "draft", draft, params)


def _dialect(draft: DraftConfig) -> Dialect | None:
    # Full layers say nothing of a window rule: the reader takes its own dialect's.
    nested = draft.window_rule == "speculators"
    for dialect in sorted(DIALECTS, key=lambda d: (d == "speculators") != nested):
        try:
            draft_json(draft, "bfloat16", dialect)
        except ValueError:
            continue
        return dialect
    return None
