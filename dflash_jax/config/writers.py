"""Configs as other systems' `config.json`: drafts in the flat and in the nested dialect, and targets.

The readers' counterpart (`dialects`, `TargetConfig.from_hf`): what is written reads back as the same
config. What a form cannot say raises one ValueError that names every such field with its value.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_jax.config.draft import DraftConfig
from dflash_jax.config.heads import DFlash2, Domino, DSpark
from dflash_jax.config.rope import RopeConfig
from dflash_jax.config.transformer import TargetConfig, TransformerConfig

_SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
_FLAT_CLASSES = {None: "DFlashDraftModel", DFlash2: "DFlash2DraftModel", Domino: "DFlashDraftModel", DSpark: "Qwen3DSparkModel"}  # fmt: skip
# speculators' type and class of each head.
_NESTED = {
    None: ("dflash", "DFlashDraftModel"), DFlash2: ("dflash2", "DFlash2DraftModel"),
    DSpark: ("dspark", "DSparkDraftModel"),
}  # fmt: skip
_TARGETS = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}  # fmt: skip
_SPECULATORS_VERSION = "0.9.0"


def write_flat(config: DraftConfig) -> dict[str, Any]:
    """The flat dialect's `config.json` that every known consumer reads (block size and RoPE in both places).

    A DSpark draft is written as NeMo has it, with the head's keys at the top level and tables of its own.

    Raises:
        ValueError: For what this dialect cannot say, all of it named.

    Source: dflash 0.1.0, and the keys that vLLM, SGLang and the TPU runtimes read.
    """
    c = config
    dspark = isinstance(c.head, DSpark)
    # NeMo's and SpecForge's windows differ from z-lab's only inside blocks longer than the window.
    as_zlab = c.window_rule == "zlab" or (
        c.window_rule != "speculators" and (c.sliding_window or 0) >= c.block_size
    )
    said = {
        "window_rule": as_zlab or "sliding_attention" not in c.layer_types,
        "sample_from_anchor": c.sample_from_anchor == dspark,
        "draft_vocab_size": c.draft_vocab_size is None,
        "own_head": c.own_head == dspark,
        "own_embedding": c.own_embedding == dspark,
        "num_target_layers": c.num_target_layers is not None,
    }
    _refuse(c, "the flat dialect", _draft_said(c) | said)
    causal = _one_rule(c)
    block = {"block_size": c.block_size, "mask_token_id": c.mask_token_id, "target_layer_ids": list(c.target_layer_ids)}  # fmt: skip
    head = {} if c.head is None else dataclasses.asdict(c.head)
    inner = {
        **block, **({"causal": True} if causal else {}), **_scales(c),
        **({"projector_type": "domino"} if isinstance(c.head, Domino) else {}), **({} if dspark else head),
    }  # fmt: skip
    return {
        **_qwen3(c), "architectures": [_FLAT_CLASSES[_kind(c)]], "is_causal": causal,
        "num_target_layers": c.num_target_layers, "block_size": c.block_size, "dflash_config": inner,
        **({**block, **head, **_dspark(c)} if dspark else {}),
    }  # fmt: skip


def write_nested(config: DraftConfig, verifier: str | None = None) -> dict[str, Any]:
    """speculators' `config.json`.

    `sliding_window_non_causal` is true for full layers too, and an `is_causal` that all layers share
    is spelt out: vLLM takes the former for every layer's rule, and the latter stands above it.

    Args:
        config: The target's depth, which this dialect leaves to the target, is not written.
        verifier: The target's hub id or folder, from which speculators takes embedding and head.

    Raises:
        ValueError: For what this dialect cannot say, all of it named.

    Source: speculators 0.9.0; `is_causal` is its converter's.
    """
    c = config
    slides = "sliding_attention" in c.layer_types
    full_and_causal = any(c.window(i) is None and c.causal(i) for i in range(c.num_hidden_layers))
    # The state after the last layer serves speculators' loss, and is no tap.
    last = c.num_target_layers is not None and c.num_target_layers - 1 in c.target_layer_ids
    said = {
        "window_rule": c.window_rule == "speculators" or not slides,
        "is_causal": not full_and_causal,
        "target_layer_ids": not last,
        "head": not isinstance(c.head, Domino),
        "own_head": c.own_head == (c.draft_vocab_size is not None),
        "own_embedding": not c.own_embedding,
    } | {name: getattr(c, name) == off for name, off in _SCALES.items()}
    _refuse(c, "speculators' dialect", _draft_said(c) | said)
    causal = _one_rule(c)
    kind, name = _NESTED[_kind(c)]
    proposals = {
        "proposal_type": "greedy", "speculative_tokens": c.max_proposals, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        "speculators_model_type": kind, "speculators_version": _SPECULATORS_VERSION, "architectures": [name],
        "transformer_layer_config": _qwen3(c) | ({} if causal is None else {"is_causal": causal}),
        "draft_vocab_size": c.draft_vocab_size or c.vocab_size, "block_size": c.block_size,
        "mask_token_id": c.mask_token_id, "aux_hidden_state_layer_ids": [i + 1 for i in c.target_layer_ids],
        "sliding_window_non_causal": not any(c.causal(i) for i in range(c.num_hidden_layers)),
        "sample_from_anchor": c.sample_from_anchor, "target_hidden_size": None, "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind, "proposal_methods": [proposals], "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        **({} if c.head is None else dataclasses.asdict(c.head)), **_dspark(c),
    }  # fmt: skip


def write_target(config: TargetConfig) -> dict[str, Any]:
    """A target's `config.json`, for transformers 4 and 5.

    Raises:
        ValueError: For what the family's transformers config cannot say, all of it named.

    Source: transformers `Qwen3Config`, `LlamaConfig` and `Qwen3MoeConfig`.
    """
    c = config
    llama, kinds = c.model_type == "llama", set(c.layer_types)
    said = {
        "qk_norm": c.qk_norm != llama,
        "mlp_bias": llama or not c.mlp_bias,
        # Llama has no windows; Qwen3-MoE has one for all layers.
        "layer_types": c.model_type == "qwen3" or kinds == {"full_attention"} or (not llama and len(kinds) == 1),
        "sliding_window": c.sliding_window is None or not llama,
    }  # fmt: skip
    _refuse(c, f"a {c.model_type} config", said)
    own = _shape(c)
    unused = {"qwen3": (), "qwen3_moe": ("layer_types", "max_window_layers"),
              "llama": ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")}  # fmt: skip
    moe = {} if c.moe is None else dataclasses.asdict(c.moe)
    return {
        **{k: v for k, v in own.items() if k not in unused[c.model_type]},
        **({"mlp_bias": c.mlp_bias} if llama else {}), **_plain(moe), "model_type": c.model_type,
        "architectures": [_TARGETS[c.model_type]], "tie_word_embeddings": c.tie_word_embeddings,
    }  # fmt: skip


def _refuse(config: TransformerConfig, form: str, said: Mapping[str, bool]) -> None:
    problems = [f"{name}={getattr(config, name)!r}" for name, fits in said.items() if not fits]
    if problems:
        raise ValueError(f"{', '.join(problems)} cannot be said in {form}")


def _draft_said(c: DraftConfig) -> dict[str, bool]:
    """What neither dialect of drafts has a key for."""
    return {
        "qk_norm": c.qk_norm,
        "mlp_bias": not c.mlp_bias,
        "last_tap": c.last_tap == "post_norm",
    }


def _kind(c: DraftConfig) -> type | None:
    return None if c.head is None else type(c.head)


def _one_rule(c: DraftConfig) -> bool | None:
    """Whether all layers are causal in the block, or none; None for causal sliding and free full layers."""
    rules = {c.causal(i) for i in range(c.num_hidden_layers)}
    return rules.pop() if len(rules) == 1 else None


def _scales(c: DraftConfig) -> dict[str, float]:
    return {k: getattr(c, k) for k, off in _SCALES.items() if getattr(c, k) != off}


def _dspark(c: DraftConfig) -> dict[str, bool]:
    """DSpark's switches beside its head's own keys, with defaults that differ between systems."""
    if not isinstance(c.head, DSpark):
        return {}
    return {
        "sample_from_anchor": c.sample_from_anchor,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }


def _qwen3(c: DraftConfig) -> dict[str, Any]:
    """A draft's layers, which are Qwen3's whatever the target is."""
    return {**_shape(c), "model_type": "qwen3", "tie_word_embeddings": False}


def _shape(c: TransformerConfig) -> dict[str, Any]:
    """The keys that all families share, windows and RoPE spelt out in every form."""
    fields = {f.name: getattr(c, f.name) for f in dataclasses.fields(TransformerConfig)}
    for name in ("rope", "qk_norm", "mlp_bias"):
        del fields[name]
    return {
        **_plain(fields), **_rope(c.rope), "hidden_act": "silu", "attention_dropout": 0.0,
        "use_sliding_window": c.sliding_window is not None, "max_window_layers": c.num_hidden_layers,
    }  # fmt: skip


def _rope(rope: RopeConfig) -> dict[str, Any]:
    """transformers 4's keys beside 5's: neither reads the other's everywhere."""
    default = RopeConfig(theta=rope.theta)
    fields = {k: v for k, v in dataclasses.asdict(rope).items() if k != "theta"}
    scaling = {k: v for k, v in fields.items() if k == "rope_type" or v != getattr(default, k)}
    scaling = _plain(scaling)
    return {
        "rope_theta": rope.theta, "rope_scaling": None if rope == default else scaling,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
    }  # fmt: skip


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
