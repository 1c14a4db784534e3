"""What a target, a draft, its head and their RoPE are: frozen, hashable values, checked when built.

`from_hf` takes a parsed Hugging Face `config.json`, in the transformers 4 or 5 form, and refuses
every key that it neither uses nor knows to be harmless; `write_flat`, `write_nested` and
`write_target` give one back.
"""

from dflash_jax.config.draft import (
    WINDOW_RULES,
    DraftConfig,
    WindowRule,
    build_target_layer_ids,
    check_target_layer_ids,
)
from dflash_jax.config.heads import DFlash2, Domino, DSpark, Head
from dflash_jax.config.moe import MoeConfig
from dflash_jax.config.pairing import mismatches
from dflash_jax.config.rope import RopeConfig
from dflash_jax.config.transformer import TargetConfig, TransformerConfig
from dflash_jax.config.writers import write_flat, write_nested, write_target

__all__ = [
    "WINDOW_RULES",
    "DFlash2",
    "DSpark",
    "Domino",
    "DraftConfig",
    "Head",
    "MoeConfig",
    "RopeConfig",
    "TargetConfig",
    "TransformerConfig",
    "WindowRule",
    "build_target_layer_ids",
    "check_target_layer_ids",
    "mismatches",
    "write_flat",
    "write_nested",
    "write_target",
]
