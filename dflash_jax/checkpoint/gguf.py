"""Reads Llama, Qwen3 and Qwen3-MoE targets from GGUF files, dequantised, with their tokenizer."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.checkpoint.files import TensorInfo, one_line, token_ids
from dflash_jax.checkpoint.gguf_file import File, Tensor, kind_of, load, nbytes_of, open_file

# GGUF's tensor names under Hugging Face's.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_FAMILIES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
_ROPE_TABLE = "rope_freqs.weight"  # llama3 scaling, as divisors
# Keys that are understood at these values only.
_FIXED = {
    "expert_shared_count": (0,), "expert_weights_norm": (True,), "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (1,), "rope.scale_linear": (1.0,), "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,), "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}  # fmt: skip


def read_config(path: Path) -> dict[str, Any]:
    """The file's metadata as a Hugging Face `config.json`.

    Raises:
        ValueError: For an unreadable file, another architecture, or metadata that is missing or that
            this reader does not know.
    """
    file = open_file(path)
    try:
        return _config(file)
    except (ValueError, TypeError, OverflowError) as e:  # a value of another type than its key's
        raise ValueError(f"{path}: {one_line(e)}") from e


def _config(file: File) -> dict[str, Any]:
    arch = file.get("general.architecture")
    if arch not in _FAMILIES:
        raise ValueError(f"architecture {arch!r} is not supported, only {', '.join(_FAMILIES)}")

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{arch}.{key}", default)

    for key, values in _FIXED.items():
        if get(key, values[0]) not in values:
            raise ValueError(f"{arch}.{key}={get(key)!r} is not supported, only {values[0]!r}")
    if arch != "qwen3moe" and get("expert_count", 0):
        raise ValueError(f"{get('expert_count')} experts: of mixtures, only qwen3moe is supported")
    names = {t.name for t in file.tensors}
    width, heads = file.get(f"{arch}.embedding_length"), file.get(f"{arch}.attention.head_count")
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"head_count={heads!r} must be one positive integer")
    head_dim = get("attention.key_length", width // heads)
    if {get("attention.value_length", head_dim), get("rope.dimension_count", head_dim)} != {
        head_dim
    }:
        raise ValueError("keys, values and RoPE of different widths are not supported")
    return {
        "model_type": _FAMILIES[arch],
        "hidden_size": width,
        "intermediate_size": file.get(f"{arch}.feed_forward_length"),
        "num_hidden_layers": file.get(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(file.get("tokenizer.ggml.tokens")),
        "max_position_embeddings": file.get(f"{arch}.context_length"),
        "rms_norm_eps": _decimal(file.get(f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(file, arch, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        **(_mixture(file, arch) if arch == "qwen3moe" else {}),
    }


def _decimal(value: float) -> float:
    """A number that is stored in float32: the shortest decimal that gives it back is the original."""
    return float(str(np.float32(value)))


def _mixture(file: File, arch: str) -> dict[str, Any]:
    return {
        "num_experts": file.get(f"{arch}.expert_count"),
        "num_experts_per_tok": file.get(f"{arch}.expert_used_count"),
        "moe_intermediate_size": file.get(f"{arch}.expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp knows no other for this architecture
    }


def _rope(file: File, arch: str, head_dim: int) -> dict[str, Any]:
    """`rope_parameters`; linear and yarn scaling from the metadata, llama3's from its table."""

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{arch}.rope.{key}", default)

    kind, theta = get("scaling.type", "none"), _decimal(get("freq_base", 10000.0))
    plain = {"rope_type": "default", "rope_theta": theta}
    context = file.get(f"{arch}.context_length")
    trained = get("scaling.original_context_length", context)
    table = [t for t in file.tensors if t.name == _ROPE_TABLE]
    if table and kind == "none":
        originals = dict.fromkeys((trained, 8192, context))
        return plain | _llama3(load(file, table[0]).ravel(), theta, head_dim, list(originals))
    if table or kind not in ("none", "linear", "yarn"):
        raise ValueError(
            f"{arch}.rope.scaling.type={kind!r}{' with a table' if table else ''} is not supported, "
            "only none, linear and yarn"
        )
    if kind == "none":
        return plain
    scaled = plain | {"rope_type": kind, "factor": _decimal(file.get(f"{arch}.rope.scaling.factor"))}  # fmt: skip
    if kind == "linear":
        return scaled
    return scaled | {
        "original_max_position_embeddings": trained,
        "beta_fast": _decimal(get("scaling.yarn_beta_fast", 32.0)),
        "beta_slow": _decimal(get("scaling.yarn_beta_slow", 1.0)),
    }


def _llama3(table: np.ndarray, theta: float, head_dim: int, originals: list[int]) -> dict[str, Any]:
    """The scaling whose divisors are `table`, for one of the original lengths that come into question.

    Raises:
        ValueError: If none gives the table to float32 precision.

    Source: llama.cpp's converter, which writes 1 for fast dimensions, the factor for slow ones, and
    the blend of transformers' `_compute_llama3_parameters` between.
    """
    factor = _decimal(float(table.max()))
    if not (table >= 1).all() or not math.isfinite(factor) or not theta > 0:
        raise ValueError(f"{_ROPE_TABLE} holds divisors below 1, or not finite")
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    for original in originals:
        # Of the published models: low_freq_factor 1, high_freq_factor 4.
        blend = np.clip((original * frequency / (2 * math.pi) - 1) / (4 - 1), 0, 1)
        divisors = 1 / ((1 - blend) / factor + blend)
        if table.shape == divisors.shape and np.allclose(table, divisors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3", "factor": factor, "original_max_position_embeddings": original,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            }  # fmt: skip
    raise ValueError(
        f"the divisors in {_ROPE_TABLE} are not llama3's for factor {factor} and an original length of "
        f"{' or '.join(map(str, originals))}; use the Hugging Face checkpoint"
    )


def read_stop_token_ids(path: Path) -> tuple[int, ...]:
    """The ids that end a text: end of sequence, and end of turn or message where the file has them.

    Raises:
        ValueError: For an unreadable file.
    """
    metadata = open_file(path).metadata
    ids = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return token_ids(list(dict.fromkeys(i for i in ids if i is not None)), path)


def read_infos(path: Path) -> Iterator[TensorInfo]:
    """Yields the file's tensors, under their Hugging Face names, without their values.

    Raises:
        ValueError: For an unreadable file.
    """
    for tensor in open_file(path).tensors:
        yield TensorInfo(
            _hf_name(tensor)[0], kind_of(tensor)[0].name, tensor.shape, nbytes_of(tensor)
        )


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (Hugging Face name, float32 array), one tensor at a time.

    Raises:
        ValueError: For an unreadable or truncated file, or a tensor in an unknown format.
    """
    file, config = open_file(path), read_config(path)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in file.tensors:
        if tensor.name == _ROPE_TABLE:  # part of the config
            continue
        name, part = _hf_name(tensor)
        try:
            value = load(file, tensor)
            if config["model_type"] == "llama" and part in heads:
                value = _half_split(value, heads[part])
        # gguf's own answer to a format that it cannot dequantise is NotImplementedError.
        except (ValueError, KeyError, NotImplementedError) as e:
            raise ValueError(f"{path}: tensor {tensor.name!r} cannot be read: {one_line(e)}") from e
        if "{}" in name:
            yield from ((name.format(e), matrix) for e, matrix in enumerate(value))
        else:
            yield name, value


def _hf_name(tensor: Tensor) -> tuple[str, str | None]:
    """A tensor's Hugging Face name, or its own if unknown, for `stream` to report; and its part of a layer.

    A "{}" in the name stands for the expert.
    """
    stem, _, suffix = tensor.name.rpartition(".")
    if not stem.startswith("blk.") or stem.count(".") != 2:
        return f"{_TOP.get(stem, stem)}.{suffix}", None
    _, layer, part = stem.split(".")
    known = f"model.layers.{layer}.{_LAYER[part]}" if part in _LAYER else stem
    return f"{known}.{suffix}", part


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's row order (interleaved rotary pairs) of Llama's query and key weights."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def read_tokenizer(path: Path):
    """The file's byte-level BPE as a transformers tokenizer, with its chat template.

    Raises:
        ValueError: For a tokenizer other than GPT-2-style BPE with a known pre-tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    metadata = open_file(path).metadata

    def get(key: str) -> Any:
        return metadata.get(f"tokenizer.{key}")

    pre = get("ggml.pre")
    if get("ggml.model") != "gpt2" or pre not in ("smollm", "qwen2"):
        raise ValueError(f"{path}: tokenizer {get('ggml.model')!r}/{pre!r} is not supported")
    missing = [k for k in ("tokens", "token_type", "merges") if not get(f"ggml.{k}")]
    if missing:
        raise ValueError(f"{path}: the GGUF metadata lacks tokenizer.ggml.{missing[0]}")
    tokens, kinds = get("ggml.tokens"), get("ggml.token_type")
    merges = [tuple(m.split(" ")) for m in get("ggml.merges")]
    try:
        tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    except Exception as e:  # tokenizers raises nothing narrower
        raise ValueError(f"{path}: the tokenizer cannot be built: {one_line(e)}") from e
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    # Kind 3 are control tokens, kind 4 the user's own: whole in the text, but part of it.
    kept = {kind: [t for t, k in zip(tokens, kinds) if k == kind] for kind in (3, 4)}
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in kept[3]])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in kept[4]])
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: get(f"ggml.{key}_token_id") for name, key in named.items()}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{name: tokens[i] for name, i in ids.items() if i is not None},
    )
    wrapped.chat_template = get("chat_template")
    return wrapped


def _pre_tokenizer(name: str):
    """How the text is cut before the merges."""
    from tokenizers import Regex, pre_tokenizers

    if name == "smollm":
        parts = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    else:
        qwen = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        parts = [
            pre_tokenizers.Split(Regex(qwen), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    return pre_tokenizers.Sequence(parts)
