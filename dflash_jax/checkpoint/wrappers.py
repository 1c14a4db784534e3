"""The text model's tensors in a multimodal checkpoint."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.checkpoint import hf
from dflash_jax.config import TargetConfig
from dflash_jax.config.wrappers import is_wrapper

_OTHERS = re.compile(r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|image_newline)(\.|$)")  # fmt: skip
_TEXT = (
    (re.compile(r"^(model\.language_model|language_model\.model)\."), "model."),
    (re.compile(r"^language_model\.(?=lm_head\.)"), ""),
)
_FUSED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


def read_target_tensors(
    folder: Path,
    raw: Mapping[str, Any],
    config: TargetConfig,
    read: Callable[[Path], Iterator[tuple[str, np.ndarray]]] = hf.read_tensors,
) -> Iterator[tuple[str, np.ndarray]]:
    """`hf.read_tensors` of a target, or of the text model of a multimodal one; see `text_tensors`.

    Args:
        read: Or `hf.map_tensors`.
    """
    tensors = read(folder)
    return text_tensors(tensors, raw, config) if is_wrapper(raw) else tensors


def text_tensors(
    tensors: Iterable[tuple[str, np.ndarray]], raw: Mapping[str, Any], config: TargetConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the text model's tensors under a plain target's names; those of images and video are left out.

    Args:
        tensors: Pairs (name, array) of a multimodal checkpoint.
        raw: Its `config.json`.
        config: Of its text model.

    Raises:
        ValueError: If fused experts could be read either way up.

    Source: the names of transformers 4 and 5; its `qwen3_vl_moe` keeps fused experts transposed.
    """
    for name, value in tensors:
        if _OTHERS.match(name):
            continue
        for pattern, prefix in _TEXT:
            name = pattern.sub(prefix, name)
        fused = _FUSED.fullmatch(name) if raw["model_type"] == "qwen3_vl_moe" else None
        yield name, _upright(name, value, fused[1], config) if fused else value


def _upright(name: str, value: np.ndarray, kind: str, config: TargetConfig) -> np.ndarray:
    """Fused experts as `[E, 2F, D]` and `[E, D, F]`."""
    D, F = config.hidden_size, config.moe.moe_intermediate_size if config.moe else 0
    wanted = (2 * F, D) if kind == "gate_up_proj" else (D, F)
    if wanted[0] == wanted[1]:
        raise ValueError(
            f"{name} {list(value.shape)} is square, so nothing tells which way up it is"
        )
    return value.swapaxes(1, 2) if value.shape[1:] == wanted[::-1] else value
