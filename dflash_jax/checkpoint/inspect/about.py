"""What a checkpoint is, in words and numbers."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dflash_jax.checkpoint.inspect.drafts import mask_text
from dflash_jax.checkpoint.inspect.facts import Facts
from dflash_jax.config import DraftConfig, TargetConfig

_FORMS = {
    "hf": "Hugging Face", "flat": "z-lab, flat", "nested": "speculators, nested", "orbax": "dflash-jax, Orbax",
    "gguf": "GGUF",
}  # fmt: skip
_TRAINERS = {
    "Qwen3DFlashDraftModel": "NeMo, flat",
    "Qwen3DFlash2DraftModel": "NeMo, flat",
    "DominoDraftModel": "SpecForge, flat",
    "Qwen3DSparkModel": "DeepSpec or NeMo DSpark, flat",
    "DSparkDraftModel": "SpecForge, flat",
}


def about(f: Facts) -> dict[str, Any]:
    """What is told of a checkpoint, in the order of the telling; as JSON has it."""
    c = f.config
    told: dict[str, Any] = {"source": str(f.path), "kind": f.kind, "dialect": _dialect(f)}
    if isinstance(c, DraftConfig):
        told |= _draft(f, c)
    elif c is not None:
        told |= {
            "architecture": c.model_type,
            **_layers(c),
            "tie_word_embeddings": c.tie_word_embeddings,
        }
        told |= (
            {}
            if c.moe is None
            else {"experts": f"{c.moe.num_experts}, {c.moe.num_experts_per_tok} a token"}
        )
        told |= {"stop_token_ids": list(f.stop_token_ids), "pad_token_id": f.pad_token_id}
    dtypes = Counter(t.dtype for t in f.tensors)
    return told | {
        "tokenizer": None if f.tokenizer is None else f"{len(f.tokenizer)} ids",
        "dtypes": dict(dtypes.most_common()),
        "tensors": len(f.tensors),
        "parameters": sum(
            math.prod(t.shape) for t in f.tensors if t.dtype not in ("bool", "int64", "int32")
        ),
        "bytes": sum(t.nbytes for t in f.tensors),
    }


def _draft(f: Facts, c: DraftConfig) -> dict[str, Any]:
    tokenizer = f.tokenizer or (f.target.tokenizer if f.target else None)
    head = None if c.head is None else dataclasses.asdict(c.head)
    return {
        "head": "DFlash" if c.head is None else f"{type(c.head).__name__} {_words(head)}", **_layers(c),
        "target_layer_ids": list(c.target_layer_ids), "stored_as": _stored(f),
        "num_target_layers": c.num_target_layers, "last_tap": c.last_tap,
        "block_size": c.block_size, "proposals": c.max_proposals, "sample_from_anchor": c.sample_from_anchor,
        "mask_token_id": c.mask_token_id,
        "mask_token": None if tokenizer is None else mask_text(tokenizer, c.mask_token_id),
        "window_rule": c.window_rule if "sliding_attention" in c.layer_types else None,
        "causal_layers": [i for i in range(c.num_hidden_layers) if c.causal(i)],
        "draft_vocab_size": c.draft_vocab_size or c.vocab_size, "own_embedding": c.own_embedding,
        "own_head": c.own_head,
    }  # fmt: skip


def _layers(c: TargetConfig | DraftConfig) -> dict[str, Any]:
    kinds = Counter(
        "full" if c.window(i) is None else f"sliding {c.window(i)}"
        for i in range(c.num_hidden_layers)
    )
    rope = {
        field.name: value
        for field in dataclasses.fields(c.rope)
        if (value := getattr(c.rope, field.name)) != field.default
    }
    return {
        "layers": c.num_hidden_layers, "layer_kinds": dict(kinds), "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "query_heads": c.num_attention_heads,
        "key_heads": c.num_key_value_heads, "head_dim": c.head_dim, "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_position_embeddings,
        "rope": {k: list(v) if isinstance(v, tuple) else v for k, v in rope.items()},
    }  # fmt: skip


def _dialect(f: Facts) -> str:
    trainers = [_TRAINERS[n] for n in f.architectures if n in _TRAINERS]
    return trainers[0] if f.form == "flat" and trainers else _FORMS[f.form]


def _stored(f: Facts) -> str:
    """In which convention the taps stand in the file."""
    if f.form == "nested":
        return f"aux_hidden_state_layer_ids {f.raw['aux_hidden_state_layer_ids']}: 1 is the first layer's output"
    return "target_layer_ids: 0 is the first layer's output"


def _words(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{k} {v}" for k, v in (values or {}).items())
