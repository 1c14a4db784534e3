"""A DFlash draft's config, and the dialects it is written in."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dflash_jax.config.heads import DFlash2, Head
from dflash_jax.config.rope import RopeConfig
from dflash_jax.config.transformer import (
    USED_KEYS,
    TransformerConfig,
    refuse_unknown,
    require_integer,
    shape_from_hf,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig(TransformerConfig):
    """A DFlash draft.

    Attributes:
        block_size: Q, the anchor and Q - 1 proposals.
        mask_token_id: Id that fills the block's other slots.
        target_layer_ids: Taps: id i is the hidden state after the target's decoder layer i.
        num_target_layers: Decoder layers of the target that it was trained for.
        last_tap: What a tap on the target's last layer means: the state after its final norm, as Hugging
            Face's `hidden_states[-1]`, or before it, as serving engines have it.
        head: What turns the hidden states into proposals; None is the target's head alone.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    last_tap: Literal["post_norm", "pre_norm"] = "post_norm"
    head: Head | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.block_size < 1:
            raise ValueError(f"{self.block_size=} must be at least 1")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"{self.mask_token_id=} is not in [0, {self.vocab_size})")
        if "sliding_attention" in self.layer_types:
            raise ValueError("drafts with sliding layers are not supported yet")
        if isinstance(self.head, DFlash2):
            self.head.check(self.hidden_size, self.vocab_size)
        check_target_layer_ids(self.target_layer_ids, self.num_target_layers)

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        target_layer_ids: tuple[int, ...] | Literal["default"] | None = None,
    ) -> "DraftConfig":
        """Reads the flat (z-lab) dialect.

        `block_size`, `mask_token_id` and `target_layer_ids` may stand at the top level or in
        `dflash_config`. Missing tap ids are an error, because the formula is wrong for most published
        drafts; `target_layer_ids` gives them, or asks for the formula with "default".

        Raises:
            ValueError: If a key is missing, unknown, out of bounds, or given twice with two values.
        """
        if config.get("model_type", "qwen3") != "qwen3":
            raise ValueError(
                f"model_type={config['model_type']!r} is not a flat DFlash draft (qwen3)"
            )
        nested = config.get("dflash_config") or {}
        refuse_unknown(
            config,
            USED_KEYS | {"dflash_config", "num_target_layers", "tie_word_embeddings", *_DFLASH},
        )
        refuse_unknown(nested, frozenset(_DFLASH), "dflash_config.")
        found: dict[str, Any] = {}
        for key in _DFLASH:
            values = [d[key] for d in (nested, config) if d.get(key) is not None]
            if any(v != values[0] for v in values):
                raise ValueError(
                    f"{key} is {config[key]!r} at the top level but {nested[key]!r} in dflash_config"
                )
            found[key] = values[0] if values else None
        missing = [key for key in ("block_size", "mask_token_id") if found[key] is None]
        depth: Any = config.get("num_target_layers")
        missing += ["num_target_layers"] if depth is None else []
        if missing:
            raise ValueError(f"the draft's config lacks {', '.join(missing)}")
        for name in ("block_size", "mask_token_id"):
            require_integer(name, found[name])
        require_integer("num_target_layers", depth)
        shape = shape_from_hf({"model_type": "qwen3", **config})
        if target_layer_ids == "default":
            ids = build_target_layer_ids(depth, shape["num_hidden_layers"])
        else:
            ids = target_layer_ids or found["target_layer_ids"]
        if ids is None:
            raise ValueError(
                "the draft's config lacks target_layer_ids; give them, or \"default\" for the reference's formula"
            )
        for i in ids:
            require_integer("an entry of target_layer_ids", i)
        if found["is_causal"]:
            raise ValueError("drafts with is_causal=true are not supported yet")
        if config.get("use_sliding_window") and config.get("sliding_window"):
            raise ValueError("drafts with sliding layers are not supported yet")
        return cls(
            block_size=found["block_size"], mask_token_id=found["mask_token_id"], target_layer_ids=tuple(ids),
            num_target_layers=depth, **shape,
        )  # fmt: skip

    def to_hf(self) -> dict[str, Any]:
        """The flat dialect's `config.json` that every known consumer reads (block size and RoPE in both places).

        Raises:
            ValueError: If `last_tap` is not Hugging Face's meaning, which this dialect takes for granted.
        """
        if self.last_tap != "post_norm":
            raise ValueError(f"last_tap={self.last_tap!r} cannot be said in the flat dialect")
        scaling = {
            f.name: getattr(self.rope, f.name)
            for f in dataclasses.fields(self.rope)
            if f.name != "theta"
        }
        default = RopeConfig(theta=self.rope.theta)
        scaling = {k: v for k, v in scaling.items() if k == "rope_type" or v != getattr(default, k)}
        shape = {f.name: getattr(self, f.name) for f in dataclasses.fields(TransformerConfig)}
        for name in ("rope", "qk_norm", "mlp_bias"):
            del shape[name]
        return {
            **shape, "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "hidden_act": "silu",
            "layer_types": list(self.layer_types), "use_sliding_window": False, "is_causal": False,
            "max_window_layers": self.num_hidden_layers, "attention_dropout": 0.0, "tie_word_embeddings": False,
            "rope_theta": self.rope.theta, "rope_scaling": None if self.rope == default else scaling,
            "rope_parameters": {"rope_theta": self.rope.theta, **scaling},
            "num_target_layers": self.num_target_layers, "block_size": self.block_size,
            "dflash_config": {
                "block_size": self.block_size, "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
        }  # fmt: skip


_DFLASH = ("block_size", "mask_token_id", "target_layer_ids", "is_causal")


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Taps spread evenly over the target: one a draft layer, from layer 1 to three before the last.

    For creating new drafts; a published draft's own ids often differ.

    Source: dflash 0.1.0 `build_target_layer_ids` (rounds halves to even).
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def check_target_layer_ids(ids: tuple[int, ...], num_target_layers: int) -> None:
    """Raises ValueError unless the ids are distinct, ascending decoder layers of the target."""
    if not ids or any(not 0 <= i < num_target_layers for i in ids):
        raise ValueError(f"target_layer_ids={list(ids)} must be ids in [0, {num_target_layers})")
    if list(ids) != sorted(set(ids)):
        raise ValueError(f"target_layer_ids={list(ids)} must be distinct and ascending")
