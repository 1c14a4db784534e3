"""What a target, a draft and their RoPE are: frozen, hashable values, checked when built.

`from_hf` takes a parsed Hugging Face `config.json`, in the transformers 4 or 5 form, and refuses
every key that it neither uses nor knows to be harmless.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

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
_ROPE_IGNORED = frozenset({"type", "rope_type", "rope_theta", "finetuned"})


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and scaling, under transformers' own names."""

    theta: float
    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # 0, here and below: not given
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self):
        if not self.theta > 0:
            raise ValueError(f"rope theta={self.theta!r} must be positive")
        needs = _ROPE_NEEDS.get(self.rope_type)
        if needs is None:
            raise ValueError(f"rope_type={self.rope_type!r} must be one of {sorted(_ROPE_NEEDS)}")
        missing = [name for name in needs if getattr(self, name) in (0, ())]
        if missing:
            raise ValueError(f"rope_type={self.rope_type!r} needs {', '.join(missing)}")
        if self.factor < 1:
            raise ValueError(f"rope factor={self.factor!r} must be at least 1")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4).

        Raises:
            ValueError: If both forms are there and disagree, or neither gives a theta.
        """
        new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
        if new and old and _normal(new) != _normal(old):
            raise ValueError(f"rope_parameters={new!r} and rope_scaling={old!r} disagree")
        scaling = new or old
        thetas = {
            float(d["rope_theta"]) for d in (scaling, config) if d.get("rope_theta") is not None
        }
        if len(thetas) > 1:
            raise ValueError(f"rope_theta is given twice, as {sorted(thetas)}")
        if not thetas:
            raise ValueError(
                "the config has no rope_theta, neither at the top level nor in rope_parameters"
            )
        fields = {f.name for f in dataclasses.fields(cls)} - {"theta", "rope_type"}
        unknown = {
            k: v for k, v in scaling.items() if k not in fields | _ROPE_IGNORED and v is not None
        }
        if unknown.pop("partial_rotary_factor", 1.0) != 1.0 or unknown:
            raise ValueError(f"unsupported RoPE parameters {scaling!r}")
        kept: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v
            for k, v in scaling.items()
            if k in fields and v is not None
        }
        rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
        if rope_type not in _ROPE_NEEDS:
            raise ValueError(f"rope_type={rope_type!r} must be one of {sorted(_ROPE_NEEDS)}")
        if "factor" in _ROPE_NEEDS[rope_type] and "factor" not in kept:
            raise ValueError(f"rope_type={rope_type!r} needs factor")
        trained = config.get("original_max_position_embeddings") or config.get(
            "max_position_embeddings"
        )
        if "original_max_position_embeddings" in _ROPE_NEEDS[rope_type]:
            kept.setdefault("original_max_position_embeddings", trained)
        if (
            rope_type == "longrope"
            and "factor" not in kept
            and config.get("original_max_position_embeddings")
        ):
            kept["factor"] = (
                config["max_position_embeddings"] / config["original_max_position_embeddings"]
            )
        return cls(theta=thetas.pop(), rope_type=rope_type, **kept)


_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
}


def _normal(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling without its theta and with one name for its type, for comparison."""
    rest = {k: v for k, v in scaling.items() if k not in _ROPE_IGNORED and v is not None}
    return {**rest, "rope_type": scaling.get("rope_type") or scaling.get("type") or "default"}


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
        positive = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                    "head_dim", "vocab_size", "max_position_embeddings")  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value!r} must be at least 1")
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
    """A decoder-only target: Qwen3 (dense) or Llama."""

    model_type: Literal["qwen3", "llama"]
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "TargetConfig":
        """Reads a Hugging Face `config.json`.

        Raises:
            ValueError: For another architecture, or a key that is missing, unknown or out of bounds.
        """
        model_type = config.get("model_type")
        if model_type not in _QK_NORM:
            raise ValueError(
                f"model_type={model_type!r} is not a supported target; supported: {sorted(_QK_NORM)}"
            )
        used = _USED | {"tie_word_embeddings"}
        _refuse_unknown(config, used)
        return cls(
            model_type=model_type,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            **_shape(config),
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
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    last_tap: Literal["post_norm", "pre_norm"] = "post_norm"

    def __post_init__(self):
        super().__post_init__()
        if self.block_size < 1:
            raise ValueError(f"{self.block_size=} must be at least 1")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"{self.mask_token_id=} is not in [0, {self.vocab_size})")
        if "sliding_attention" in self.layer_types:
            raise ValueError("drafts with sliding layers are not supported yet")
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
        _refuse_unknown(
            config, _USED | {"dflash_config", "num_target_layers", "tie_word_embeddings", *_DFLASH}
        )
        _refuse_unknown(nested, frozenset(_DFLASH), "dflash_config.")
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
            _require_integer(name, found[name])
        _require_integer("num_target_layers", depth)
        shape = _shape({"model_type": "qwen3", **config})
        if target_layer_ids == "default":
            ids = build_target_layer_ids(depth, shape["num_hidden_layers"])
        else:
            ids = target_layer_ids or found["target_layer_ids"]
        if ids is None:
            raise ValueError(
                "the draft's config lacks target_layer_ids; give them, or \"default\" for the reference's formula"
            )
        for i in ids:
            _require_integer("an entry of target_layer_ids", i)
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


_QK_NORM = {"qwen3": True, "llama": False}
_DFLASH = ("block_size", "mask_token_id", "target_layer_ids", "is_causal")
_USED = frozenset(f.name for f in dataclasses.fields(TransformerConfig)) - {"rope", "qk_norm"} | {
    "rope_theta", "rope_scaling", "rope_parameters", "use_sliding_window", "original_max_position_embeddings",
}  # fmt: skip


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


def _refuse_unknown(config: Mapping[str, Any], used: frozenset[str], prefix: str = "") -> None:
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


def _require_integer(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be an integer")


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
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
            _require_integer(key, config[key])
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
        first = config.get("max_window_layers", 28)  # Qwen3Config's default
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
