"""Whether a draft was made for a target."""

from collections.abc import Sequence

from dflash_jax.config.draft import DraftConfig
from dflash_jax.config.transformer import TargetConfig


def mismatches(
    target: TargetConfig,
    stop_token_ids: Sequence[int],
    draft: DraftConfig,
    pad_token_id: int | None = None,
) -> list[tuple[str, str]]:
    """Every difference that keeps a draft from a target: its field, and what is said of it, naming both sides."""
    sides = (
        ("hidden_size", draft.hidden_size, "hidden_size", target.hidden_size),
        ("vocab_size", draft.vocab_size, "vocab_size", target.vocab_size),
        ("num_target_layers", draft.num_target_layers, "num_hidden_layers", target.num_hidden_layers),
    )  # fmt: skip
    found = [
        (name, f"the draft's {name}={mine} is not the target's {other}={theirs}")
        for name, mine, other, theirs in sides
        if mine not in (None, theirs)
    ]
    outside = [i for i in draft.target_layer_ids if i >= target.num_hidden_layers]
    if outside:
        found.append((
            "target_layer_ids",
            f"the draft's target_layer_ids {outside} are not below the target's "
            f"num_hidden_layers={target.num_hidden_layers}",
        ))  # fmt: skip
    mask = draft.mask_token_id
    masks = (
        (mask >= target.vocab_size, f"no row of the target's vocab_size={target.vocab_size}"),
        (mask in stop_token_ids, f"one of the target's stop ids {list(stop_token_ids)}"),
        (mask == pad_token_id, "the target's pad_token_id"),
    )
    told = f"the draft's mask_token_id={mask} is"
    return found + [("mask_token_id", f"{told} {what}") for wrong, what in masks if wrong]
