"""The published draft that a recipe may start from, which then decides the draft's shape.

A recipe may add to it: layers behind its own, a head, a reduced vocabulary, tables of its own. What is
added starts so that it hardly changes what the draft says.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dflash_jax.checkpoint import hf
from dflash_jax.config import DraftConfig
from dflash_jax.models.draft import first_slot
from dflash_jax.pair import open_draft, read_draft_config

SHAPE = ("num_hidden_layers", "block_size", "mask_token_id", "target_layer_ids")
# Whether a value that a recipe gives adds to that of its `init`.
_ADDS: dict[str, Callable[[Any, Any], bool]] = {
    "num_hidden_layers": lambda has, wanted: wanted > has,
    "head": lambda has, wanted: has is None,
    "draft_vocab_size": lambda has, wanted: has is None,
    "own_embedding": lambda has, wanted: wanted,
    "own_head": lambda has, wanted: wanted,
}


def init_config(recipe: Mapping[str, Any], num_target_layers: int | None = None) -> DraftConfig:
    """The config of a recipe's `init`, in any readable dialect, with the recipe's layers; no tensor is read.

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
    return grown(ref, config, {k: recipe[k] for k in SHAPE if k in recipe})


def grown(ref: str, config: DraftConfig, said: Mapping[str, Any]) -> DraftConfig:
    """The config of the `init` with what a recipe adds; new layers are like its last one.

    Raises:
        ValueError: If what the recipe says is not so and adds nothing either.
    """
    differs = {k: value for k, value in said.items() if value != getattr(config, k)}
    added = {k: v for k, v in differs.items() if k in _ADDS and _ADDS[k](getattr(config, k), v)}
    if other := differs.keys() - added.keys():
        of = (vars(config), said)
        has, says = (", ".join(f"{k}={x[k]!r}" for k in differs if k in other) for x in of)
        raise ValueError(f"init={ref!r} has {has}, but the recipe says {says}")
    new = added.get("num_hidden_layers", config.num_hidden_layers) - config.num_hidden_layers
    layer_types = (*config.layer_types, *[config.layer_types[-1]] * new)
    whole = dataclasses.replace(config, **added, layer_types=layer_types)
    if first_slot(whole) != first_slot(config):
        raise ValueError(
            f"init={ref!r} predicts from slot {first_slot(config)} on, but head={whole.head!r} from slot "
            f"{first_slot(whole)} on"
        )
    return whole
