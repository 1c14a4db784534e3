"""The text model inside a multimodal checkpoint's config: a target like any other, for text."""

from collections.abc import Mapping
from typing import Any

# Wrappers whose language model is a plain one that is given image features among its embeddings.
_WRAPPERS = frozenset(
    ("internvl", "llava", "llava_next", "llava_next_video", "llava_onevision", "qwen3_vl", "qwen3_vl_moe",
     "video_llava", "vipllava")
)  # fmt: skip
# What a wrapper's own text models are when they read nothing but text.
_TEXT_MODELS = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
# A token of text has one position on all three axes, so its rotation is the plain one.
_MROPE = ("mrope_section", "mrope_interleaved")
_SHARED = ("eos_token_id", "pad_token_id", "quantization_config")


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether a target's config is a multimodal one."""
    return isinstance(config.get("text_config"), Mapping)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model that a multimodal one wraps; any other config as it is.

    Raises:
        ValueError: For a wrapper that is not known.

    Source: transformers' `Qwen3VLTextConfig`, `Qwen3VLMoeTextConfig` and `LlavaConfig`.
    """
    if not is_wrapper(config):
        return config
    if config.get("model_type") not in _WRAPPERS:
        raise ValueError(
            f"model_type={config.get('model_type')!r} is not a supported multimodal target; supported: {sorted(_WRAPPERS)}"
        )
    text = dict(config["text_config"])
    kind = text.get("model_type")
    text["model_type"] = _TEXT_MODELS.get(str(kind), kind)
    if kind == "qwen3_vl_moe_text":  # its router has no other way
        text["norm_topk_prob"] = True
    for name in ("rope_scaling", "rope_parameters"):
        rope = {k: v for k, v in (text.get(name) or {}).items() if k not in _MROPE}
        rope.update({k: "default" for k in ("type", "rope_type") if rope.get(k) == "mrope"})
        text[name] = rope or None
    whole, inner = (part.get("tie_word_embeddings") for part in (config, text))
    if kind in _TEXT_MODELS:  # the wrapper's word stands; LLaVA's ties if either says so
        inner = inner if whole is None else whole
    given = {key: config[key] for key in _SHARED if config.get(key) is not None}
    return {**text, **given, "tie_word_embeddings": bool(whole or inner)}
