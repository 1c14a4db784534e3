"""The dialects that published drafts' `config.json` come in, read into `DraftConfig`'s fields.

Flat: z-lab's, which NeMo Automodel and SpecForge write too, each with keys of its own. Nested:
speculators', with the layers' shape in `transformer_layer_config` and taps counted from 1.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from dflash_jax.config.fields import build
from dflash_jax.config.heads import DFlash2, Domino, DSpark, Head
from dflash_jax.config.transformer import (
    USED_KEYS,
    refuse_unknown,
    require_integer,
    shape_from_hf,
)

_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_DOMINO = ("projector_type", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label")
_DSPARK = (
    "markov_rank", "markov_head_type", "num_anchors", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_EAGLE = "eagle_aux_hidden_state_layer_ids"  # vLLM's name for the taps, counted from 1
FLAT_KEYS = (
    "block_size", "mask_token_id", "target_layer_ids", "is_causal", "causal", "sample_from_anchor", "use_swa",
    "swa_window_size", _EAGLE, *_SCALES, *_DFLASH2, *_DOMINO, *_DSPARK,
)  # fmt: skip
_NESTED = (
    "speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config",
    "draft_vocab_size", "block_size", "aux_hidden_state_layer_ids", "mask_token_id", "sliding_window_non_causal",
    "sample_from_anchor", "target_hidden_size", "tie_word_embeddings", *_DFLASH2, *_DSPARK,
)  # fmt: skip
# Classes that one trainer alone writes, and its window rule.
_TRAINERS = {
    "Qwen3DFlashDraftModel": "nemo",
    "Qwen3DFlash2DraftModel": "nemo",
    "DominoDraftModel": "specforge",
}
_SPECULATORS = {"dflash": None, "dflash2": "DFlash2", "dspark": "DSpark"}


def is_nested(config: Mapping[str, Any]) -> bool:
    """Whether a draft's config is in speculators' dialect."""
    return "speculators_model_type" in config


def read_flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """`DraftConfig`'s fields of the flat dialect; `target_layer_ids` may be None.

    A key may stand at the top level or in `dflash_config`. Two contradictions that are known:

    - `dflash_config.causal` true beside `is_causal` false is how NeMo's JetSpec trainer writes its
      causal drafts: the draft is causal, with a warning.
    - `use_sliding_window` false (or absent) beside sliding `layer_types` is refused: transformers
      then drops the window, so nobody can have run the draft as it was trained.

    Raises:
        ValueError: If a key is missing, unknown, out of bounds, or given twice with two values.

    Source: dflash 0.1.0; the keys of NeMo Automodel and specforge 0.2.0.
    """
    if config.get("model_type", "qwen3") != "qwen3":
        raise ValueError(f"model_type={config['model_type']!r} is not a flat DFlash draft (qwen3)")
    nested = config.get("dflash_config") or {}
    known = USED_KEYS | {"dflash_config", "num_target_layers", "tie_word_embeddings", *FLAT_KEYS}
    refuse_unknown(config, known)
    refuse_unknown(nested, frozenset(FLAT_KEYS), "dflash_config.")
    found: dict[str, Any] = {}
    for key in FLAT_KEYS:
        values = [d[key] for d in (nested, config) if d.get(key) is not None]
        if any(v != values[0] for v in values):
            raise ValueError(
                f"{key} is {config[key]!r} at the top level but {nested[key]!r} in dflash_config"
            )
        found[key] = values[0] if values else None
    found["num_target_layers"] = config.get("num_target_layers")
    _require(found, "block_size", "mask_token_id", "num_target_layers")
    names = [str(n) for n in config.get("architectures") or ()]
    head = _read_head(found, names)
    is_causal = _causality(found)
    if found["use_swa"]:
        config, is_causal = _swa(config, found), bool(is_causal)
    check_window(config)
    anchored = _boolean(found, "sample_from_anchor")
    shape = shape_from_hf({"model_type": "qwen3", **config})
    rules = {
        _TRAINERS[n]
        for n in names
        if n in _TRAINERS and "sliding_attention" in shape["layer_types"]
    }
    return {
        **shape, **_scales(found),
        "block_size": found["block_size"], "mask_token_id": found["mask_token_id"],
        "target_layer_ids": _flat_taps(found), "num_target_layers": found["num_target_layers"],
        "is_causal": is_causal, "window_rule": rules.pop() if rules else "zlab", "head": head,
        "sample_from_anchor": isinstance(head, DSpark) if anchored is None else anchored,
    }  # fmt: skip


def _flat_taps(found: Mapping[str, Any]) -> Any:
    """`target_layer_ids`; vLLM's key, which it reads first, must say the same."""
    ids, eagle = found["target_layer_ids"], found[_EAGLE]
    if eagle is None:
        return ids
    for i in eagle:
        require_integer(f"an entry of {_EAGLE}", i)
    taps = [i - 1 for i in eagle]
    if ids not in (None, taps):
        raise ValueError(f"{_EAGLE}={eagle!r} must be target_layer_ids={ids!r}, each plus 1")
    return taps


def read_nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """`DraftConfig`'s fields of speculators' dialect; `num_target_layers` is None, as it is not told.

    `aux_hidden_state_layer_ids` count the embedding output as 0, so a tap is one less. An `is_causal`
    in `transformer_layer_config` comes from a converted flat draft and rules all layers; without it
    `sliding_window_non_causal` rules the sliding layers, and full layers see their whole block.

    Raises:
        ValueError: If a key is missing, unknown or out of bounds, or `is_causal` is true beside a
            true `sliding_window_non_causal`.

    Source: speculators 0.9.0.
    """
    kind = config.get("speculators_model_type")
    if kind not in _SPECULATORS:
        raise ValueError(f"speculators_model_type={kind!r} must be one of {sorted(_SPECULATORS)}")
    refuse_unknown(config, frozenset(_NESTED))
    inner = config.get("transformer_layer_config") or {}
    known = USED_KEYS | {"tie_word_embeddings", "is_causal"}
    refuse_unknown(inner, known, "transformer_layer_config.")
    if inner.get("model_type", "qwen3") != "qwen3":
        raise ValueError(
            f"transformer_layer_config.model_type={inner['model_type']!r} is not qwen3"
        )
    _require(config, "block_size", "mask_token_id", "draft_vocab_size")
    check_window(inner)
    shape = shape_from_hf({"model_type": "qwen3", **inner})
    hidden, vocab = config.get("target_hidden_size"), config["draft_vocab_size"]
    if hidden not in (None, shape["hidden_size"]):
        raise ValueError(
            f"target_hidden_size={hidden!r} is not the draft's hidden_size={shape['hidden_size']}"
        )
    ids = config.get("aux_hidden_state_layer_ids")
    for i in ids or ():
        require_integer("an entry of aux_hidden_state_layer_ids", i)
    anchored = _boolean(config, "sample_from_anchor")
    return {
        **shape, "block_size": config["block_size"], "mask_token_id": config["mask_token_id"],
        "target_layer_ids": None if ids is None else [i - 1 for i in ids], "num_target_layers": None,
        "is_causal": _nested_causality(config, inner, shape["layer_types"]), "window_rule": "speculators",
        "draft_vocab_size": None if vocab == shape["vocab_size"] else vocab,
        "head": _read_head({k: config.get(k) for k in FLAT_KEYS}, [], _SPECULATORS[kind]),
        "sample_from_anchor": kind == "dspark" if anchored is None else anchored,
    }  # fmt: skip


def _require(config: Mapping[str, Any], *names: str) -> None:
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise ValueError(f"the draft's config lacks {', '.join(missing)}")
    for name in names:
        require_integer(name, config[name])


def _boolean(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")
    return value


def _scales(found: Mapping[str, Any]) -> dict[str, float | None]:
    """The knobs on embeddings and logits; a softcap of 0 is none."""
    for name in _SCALES:
        if found[name] is not None and not isinstance(found[name], int | float):
            raise ValueError(f"{name}={found[name]!r} must be a number")
    embedding, output, cap = (found[name] for name in _SCALES)
    return {
        "input_embedding_scale": 1.0 if embedding is None else float(embedding),
        "output_multiplier": 1.0 if output is None else float(output),
        "final_logit_softcapping": float(cap) if cap else None,
    }


def _causality(found: Mapping[str, Any]) -> bool | None:
    """`is_causal` of the flat dialect; see `read_flat` for the contradiction."""
    every, jetspec = _boolean(found, "is_causal"), _boolean(found, "causal")
    if every is None or jetspec is None or every == jetspec:
        return jetspec if every is None else every
    if every:
        raise ValueError("is_causal is true but dflash_config.causal is false")
    warnings.warn(
        "is_causal is false but dflash_config.causal is true, as NeMo's JetSpec writes it: taken as causal",
        stacklevel=2,
    )
    return True


def _nested_causality(
    config: Mapping[str, Any], inner: Mapping[str, Any], layer_types: tuple[str, ...]
) -> bool | None:
    """`is_causal` of speculators' dialect; see `read_nested`."""
    every = _boolean(inner, "is_causal")
    free = _boolean(config, "sliding_window_non_causal")
    if "sliding_attention" not in layer_types:
        return bool(every)
    if every is None and free is None:
        raise ValueError(
            "the draft's config lacks sliding_window_non_causal, for its sliding layers"
        )
    if every and free:
        raise ValueError("is_causal is true but sliding_window_non_causal is true")
    return every if every is not None else (False if free else None)


def check_window(config: Mapping[str, Any]) -> None:
    """Raises ValueError for sliding layers without a window, or with one that is switched off."""
    if "sliding_attention" in (config.get("layer_types") or ()):
        if not config.get("use_sliding_window"):
            raise ValueError(
                f"layer_types has sliding_attention but use_sliding_window={config.get('use_sliding_window')!r}: "
                "set it to true if the draft was trained with its window, else make the layers full_attention"
            )
        if not config.get("sliding_window"):
            raise ValueError(
                "layer_types has sliding_attention but the config lacks sliding_window"
            )


def _swa(config: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The config with vLLM's `use_swa` spelt out: all layers slide."""
    if config.get("layer_types") is not None:
        raise ValueError("use_swa and layer_types are both given")
    window = found["swa_window_size"] or config.get("sliding_window")
    if window is None:
        raise ValueError("use_swa is true but the config lacks swa_window_size")
    layers = ["sliding_attention"] * config["num_hidden_layers"]
    return {**config, "layer_types": layers, "sliding_window": window, "use_sliding_window": True}


def _read_head(found: Mapping[str, Any], names: list[str], kind: str | None = None) -> Head | None:
    """The head that a class name, `projector_type` or a head's keys ask for.

    Args:
        found: Every key of the heads, None where absent.
        names: `architectures`.
        kind: The head's class, if the dialect says it.
    """
    if found["projector_type"] not in (None, "domino"):
        raise ValueError(f"projector_type={found['projector_type']!r} is not supported")
    keys = {"DFlash2": _DFLASH2, "Domino": _DOMINO, "DSpark": ("markov_rank",)}
    kinds = {
        k
        for k, own in keys.items()
        if any(k in n for n in names) or any(found[key] is not None for key in own)
    } | ({kind} if kind else set())
    if len(kinds) > 1:
        raise ValueError(
            f"the draft's config has keys of several heads: {', '.join(sorted(kinds))}"
        )
    if kinds == {"DFlash2"}:
        _require(found, *_DFLASH2)
        return build(DFlash2, {key: found[key] for key in _DFLASH2})
    if kinds == {"Domino"}:
        _require(found, "emb_dim", "gru_hidden_dim")
        # Absent, these two are specforge's defaults; NeMo always writes them.
        prefix, shift = found["pure_draft_prefix_len"] or 0, _boolean(found, "shift_label")
        require_integer("pure_draft_prefix_len", prefix)
        widths = {key: found[key] for key in ("emb_dim", "gru_hidden_dim")}
        return build(
            Domino, {**widths, "pure_draft_prefix_len": prefix, "shift_label": bool(shift)}
        )
    if kinds == {"DSpark"}:
        _require(found, "markov_rank")
        for name, only in (("markov_head_type", "vanilla"), ("enable_confidence_head", False)):
            if found[name] not in (None, only):
                raise ValueError(f"{name}={found[name]!r} is not supported, only {only!r}")
        return build(DSpark, {"markov_rank": found["markov_rank"]})
    return None
