"""Rotary embedding: its base and scaling."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dflash_jax.config.fields import build

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
        return build(cls, {"theta": thetas.pop(), "rope_type": rope_type, **kept})


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
