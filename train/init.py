"""The published draft that a recipe may start from, which then decides the draft's shape."""

from collections.abc import Mapping
from typing import Any

from dflash_jax.checkpoint import hf
from dflash_jax.config import DraftConfig
from dflash_jax.pair import open_draft, read_draft_config

SHAPE = ("num_hidden_layers", "block_size", "mask_token_id", "target_layer_ids")


def init_config(recipe: Mapping[str, Any], num_target_layers: int | None = None) -> DraftConfig:
    """The config of a recipe's `init`, in any readable dialect; no tensor is read.

    Args:
        recipe: The keys that the recipe gives. Taps are taken from it only if the checkpoint has none.
        num_target_layers: Of the target, if the checkpoint does not say.

    Raises:
        ValueError: If it is no readable draft, or a key of `SHAPE` contradicts it.
    """
    ref, ids = recipe["init"], recipe.get("target_layer_ids")
    try:
        path = hf.resolve(ref)
    except ValueError as e:
        raise ValueError(f"init={ref!r}: {e}") from e
    try:
        config = read_draft_config(path, num_target_layers=num_target_layers)
    except ValueError as e:
        if ids is None or "target_layer_ids" not in str(e):
            raise
        config = read_draft_config(path, ids, num_target_layers=num_target_layers)
    config = open_draft(path, config)[0].config
    check_said(ref, config, {k: recipe[k] for k in SHAPE if k in recipe})
    return config


def check_said(ref: str, config: DraftConfig, said: Mapping[str, Any]) -> None:
    """Raises ValueError if what a recipe says of its `init` is not so."""
    other = {k: value for k, value in said.items() if value != getattr(config, k)}
    if other:
        has, says = (", ".join(f"{k}={x[k]!r}" for k in other) for x in (vars(config), said))
        raise ValueError(f"init={ref!r} has {has}, but the recipe says {says}")
