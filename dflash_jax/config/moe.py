"""The mixture of experts of a sparse target."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_jax.config.fields import build

_KEYS = """
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    decoder_sparse_step mlp_only_layers router_aux_loss_coef output_router_logits
"""
MOE_KEYS = frozenset(_KEYS.split())  # the last two serve training only


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Sparse MLPs, under Hugging Face's names.

    Attributes:
        num_experts: MLPs of a sparse layer.
        num_experts_per_tok: How many of them a token passes through.
        moe_intermediate_size: Width of one expert.
        norm_topk_prob: Whether the chosen experts' probabilities are scaled to sum to 1.
        decoder_sparse_step: Layer i is sparse if i + 1 is a multiple of it.
        mlp_only_layers: Layers that are dense all the same.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def __post_init__(self):
        for name in (
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "decoder_sparse_step",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value!r} must be at least 1")
        if self.num_experts > 4096:
            raise ValueError(f"num_experts={self.num_experts} must be at most 4096")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be at most "
                f"num_experts={self.num_experts}"
            )
        if any(i < 0 for i in self.mlp_only_layers):
            raise ValueError(f"mlp_only_layers={list(self.mlp_only_layers)!r} must be at least 0")

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer` is a mixture. Source: transformers `Qwen3MoeDecoderLayer`."""
        return (layer + 1) % self.decoder_sparse_step == 0 and layer not in self.mlp_only_layers

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "MoeConfig":
        """Reads the keys of a Hugging Face `config.json`, transformers 4 or 5.

        Raises:
            ValueError: For a key that is missing, out of bounds, or given twice with two values.
        """
        given = {k: v for k, v in config.items() if k in MOE_KEYS and v is not None}
        experts = given.pop("num_local_experts", None)  # transformers 5's name
        if experts is not None and given.setdefault("num_experts", experts) != experts:
            raise ValueError(
                f"num_experts={given['num_experts']!r} and num_local_experts={experts!r} disagree"
            )
        fields = dataclasses.fields(cls)
        missing = [
            f.name for f in fields if f.name not in given and f.default is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(f"the config lacks {', '.join(missing)}")
        values: dict[str, Any] = {
            f.name: tuple(given[f.name]) if isinstance(given[f.name], list) else given[f.name]
            for f in fields
            if f.name in given
        }
        return build(cls, values)
