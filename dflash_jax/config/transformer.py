"""The shape that targets and drafts share, and the target's own config."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dflash_jax.config.fields import build
from dflash_jax.config.moe import MOE_KEYS, MoeConfig
from dflash_jax.config.rope import RopeConfig
from dflash_jax.config.wrappers import text_config

# Keys that say nothing about the forward pass, at any value.
_HARMLESS = """
    architectures auto_map _name_or_path name_or_path transformers_version dtype torch_dtype use_cache
    initializer_range attention_dropout bos_token_id eos_token_id pad_token_id output_attentions
    output_hidden_states return_dict model_type max_window_layers pretraining_tp chunk_size_feed_forward
    is_encoder_decoder is_decoder id2label label2id problem_type is_llama_config
    transformers.js_config num_labels cross_attention_hidden_size add_cross_attention
"""
_IGNORED = frozenset(_HARMLESS.split())
# Keys accepted at this value only: another value would change the maths.
_FIXED = {
    "hidden_act": "silu",
    "pruned_heads": {},
    "tie_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "logit_scale": None,
    "rope_interleaved": False,
}

# Far above every model: a number out of a broken file must not become that many layers or bytes.
_MOST = {
    "hidden_size": 2**20, "intermediate_size": 2**20, "num_hidden_layers": 1024, "num_attention_heads": 4096,
    "num_key_value_heads": 4096, "head_dim": 4096, "vocab_size": 2**24, "max_position_embeddings": 2**31 - 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape that targets and drafts share, under Hugging Face's names."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()

    def __post_init__(self):
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value!r} must be at least 1")
            if value > most:
                raise ValueError(f"{name}={value!r} must be at most {most}")
        if not self.rms_norm_eps > 0:
            raise ValueError(f"rms_norm_eps={self.rms_norm_eps!r} must be positive")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads=} is not a multiple of {self.num_key_value_heads=}"
            )
        if self.head_dim % 2:
            raise ValueError(f"{self.head_dim=} must be even: RoPE rotates its two halves")
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers=}"
            )
        unknown = sorted(set(self.layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(
                f"layer_types holds {unknown}; only full_attention and sliding_attention can be rewound"
            )
        if "sliding_attention" in self.layer_types and not (
            self.sliding_window and self.sliding_window > 0
        ):
            raise ValueError(
                f"layer_types has sliding_attention, but sliding_window={self.sliding_window!r}"
            )

    def window(self, layer: int) -> int | None:
        """Newest positions that `layer` sees, or None for all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig(TransformerConfig):
    """A decoder-only target: Qwen3, Qwen3-MoE or Llama.

    Attributes:
        moe: The mixture of its sparse layers; of qwen3_moe, and only of it.
    """

    model_type: Literal["qwen3", "llama", "qwen3_moe"]
    tie_word_embeddings: bool = False
    moe: MoeConfig | None = None

    def __post_init__(self):
        super().__post_init__()
        if (self.model_type == "qwen3_moe") != (self.moe is not None):
            raise ValueError(f"model_type={self.model_type!r} does not go with moe={self.moe!r}")
        if self.moe is None:
            return
        if self.mlp_bias:
            raise ValueError("mlp_bias=True is not supported with experts")
        outside = [i for i in self.moe.mlp_only_layers if i >= self.num_hidden_layers]
        if outside:
            raise ValueError(
                f"mlp_only_layers holds {outside}, not below num_hidden_layers={self.num_hidden_layers}"
            )

    def mixture(self, layer: int) -> MoeConfig | None:
        """What stands for the MLP of `layer`, or None for a dense one."""
        return self.moe if self.moe is not None and self.moe.is_sparse(layer) else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "TargetConfig":
        """Reads a Hugging Face `config.json`; of a multimodal one, the text model's part.

        Raises:
            ValueError: For another architecture, or a key that is missing, unknown or out of bounds.
        """
        _refuse_recurrent(config)
        config = text_config(config)
        model_type = config.get("model_type")
        if model_type not in _QK_NORM:
            raise ValueError(
                f"model_type={model_type!r} is not a supported target; supported: {sorted(_QK_NORM)}"
            )
        sparse = model_type == "qwen3_moe"
        refuse_unknown(
            config, USED_KEYS | {"tie_word_embeddings"} | (MOE_KEYS if sparse else frozenset())
        )
        fields = {
            "model_type": model_type,
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
            "moe": MoeConfig.from_hf(config) if sparse else None,
        }
        return build(cls, {**fields, **shape_from_hf(config)})


_QK_NORM = {"qwen3": True, "llama": False, "qwen3_moe": True}
USED_KEYS = frozenset(f.name for f in dataclasses.fields(TransformerConfig)) - {"rope", "qk_norm"} | {
    "rope_theta", "rope_scaling", "rope_parameters", "use_sliding_window", "original_max_position_embeddings",
}  # fmt: skip


# Model types and layer kinds that fold what they have read into a state.
_RECURRENT = """
    bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax
    nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma
    rwkv zamba zamba2
"""
_RECURRENT_MODELS = frozenset(_RECURRENT.split())
_RECURRENT_LAYERS = frozenset(
    ("conv", "hybrid", "linear_attention", "mamba", "mamba2", "recurrent")
)


def _refuse_recurrent(config: Mapping[str, Any]) -> None:
    """Says why a target whose layers carry a state is refused.

    Source: the rule of NeMo Automodel `assert_target_supports_rollback`.
    """
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    found: set[str] = set()
    for part in (config, text):
        found |= _RECURRENT_MODELS & {part.get("model_type")}
        for key in ("layer_types", "layers_block_type", "block_types"):
            found |= set(part.get(key) or ()) & _RECURRENT_LAYERS
    if found:
        raise ValueError(
            f"model_type={config.get('model_type')!r} has recurrent layers ({', '.join(sorted(found))}): their "
            "state cannot be rewound past rejected tokens, so DFlash would not be lossless"
        )


def refuse_unknown(config: Mapping[str, Any], used: frozenset[str], prefix: str = "") -> None:
    unknown = sorted(
        prefix + k
        for k, v in config.items()
        if k not in used | _IGNORED | _FIXED.keys() and not k.startswith("_") and v is not None
    )
    if unknown:
        raise ValueError(f"the config has keys that are not understood: {', '.join(unknown)}")
    for key, value in _FIXED.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"{prefix}{key}={config[key]!r} is not supported, only {value!r}")


def require_integer(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be an integer")


def shape_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """TransformerConfig's fields from a Hugging Face config."""
    required = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    missing = [key for key in required if config.get(key) is None]
    if missing:
        raise ValueError(f"the config lacks {', '.join(missing)}")
    for key in (*required, "num_key_value_heads", "head_dim", "sliding_window"):
        if config.get(key) is not None and key != "rms_norm_eps":
            require_integer(key, config[key])
    if not isinstance(config["rms_norm_eps"], float | int):
        raise ValueError(f"rms_norm_eps={config['rms_norm_eps']!r} must be a number")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim")
    if head_dim is None:
        # Qwen3 always writes head_dim (its default is 128); older Llama configs imply it.
        if config["model_type"] == "qwen3":
            raise ValueError("the config lacks head_dim")
        head_dim = config["hidden_size"] // heads
    layers = config["num_hidden_layers"]
    use_window = config.get("use_sliding_window", False)
    layer_types = config.get("layer_types")
    if layer_types is None and use_window and config.get("sliding_window"):
        # Qwen3Config's default; transformers' Qwen3-MoE windows every layer.
        first = 0 if config["model_type"] == "qwen3_moe" else config.get("max_window_layers", 28)
        layer_types = [
            "full_attention" if i < first else "sliding_attention" for i in range(layers)
        ]
    return {key: config[key] for key in required} | {
        "rms_norm_eps": float(config["rms_norm_eps"]),
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "rope": RopeConfig.from_hf(config),
        "qk_norm": _QK_NORM[config["model_type"]],
        "attention_bias": bool(config.get("attention_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "sliding_window": config.get("sliding_window") if use_window else None,
        "layer_types": tuple(layer_types or ()),
    }
