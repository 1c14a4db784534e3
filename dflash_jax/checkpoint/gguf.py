"""Reads Llama and Qwen3 targets from GGUF files, dequantised, with their tokenizer.

The header is parsed here: the gguf package's reader makes an object of every token and merge,
which takes longer than reading the weights. The package's block formats are used as they are.
"""

import dataclasses
import functools
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.checkpoint.files import TensorInfo, one_line, token_ids

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
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_TABLE = "rope_freqs.weight"  # llama3 scaling, as divisors

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor's place in the file; `shape` is numpy's, so the last axis is contiguous."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclasses.dataclass(frozen=True)
class _File:
    metadata: dict[str, Any]
    tensors: tuple[_Tensor, ...]
    data: np.ndarray  # the mapped bytes from the first tensor on

    def get(self, key: str) -> Any:
        """A value that must be there."""
        if key not in self.metadata:
            raise ValueError(f"the GGUF metadata lacks {key}")
        return self.metadata[key]


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, buffer: mmap.mmap):
        self.buffer, self.at = buffer, 0

    def take(self, code: str, count: int = 1) -> tuple:
        fmt = f"<{count}{code}"
        values = struct.unpack_from(fmt, self.buffer, self.at)
        self.at += struct.calcsize(fmt)
        return values

    def one(self, code: str) -> Any:
        return self.take(code)[0]

    def string(self) -> str:
        size = self.one("Q")
        end = self.at + size
        if end > len(self.buffer):
            raise ValueError(f"a string of {size} bytes reaches past the end")
        text = self.buffer[self.at : end].decode("utf-8")
        self.at = end
        return text

    def value(self) -> Any:
        kind = self.one("I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.one(_SCALARS[kind])
        kind, count = self.one("I"), self.one("Q")
        if count > len(self.buffer) - self.at:
            raise ValueError(f"an array of {count} values reaches past the end")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return list(self.take(_SCALARS[kind], count))


def _open(path: Path) -> _File:
    """The parsed header; the newest one is kept, while the file is unchanged.

    Raises:
        ValueError: For an unreadable file.
    """
    try:
        stat = path.stat()
        return _parse(path, stat.st_mtime_ns, stat.st_size)
    except KeyError as e:
        raise ValueError(f"{path} is not a readable GGUF file: unknown value type {e}") from e
    except (OSError, ValueError, TypeError, struct.error, OverflowError, MemoryError) as e:
        raise ValueError(f"{path} is not a readable GGUF file: {one_line(e)}") from e


@functools.lru_cache(maxsize=1)
def _parse(path: Path, mtime: int, size: int) -> _File:
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(buffer)
    magic, version = buffer[:4], None
    if magic == b"GGUF":
        cursor.at = 4
        version = cursor.one("I")
    if version not in (2, 3):
        raise ValueError(f"magic {magic!r} and version {version} are not b'GGUF' and 2 or 3")
    tensor_count, entries = cursor.take("Q", 2)
    metadata = {}
    for _ in range(entries):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"the metadata has {key!r} twice")
        metadata[key] = cursor.value()
    tensors = []
    for _ in range(tensor_count):
        name = cursor.string()
        shape = cursor.take("Q", cursor.one("I"))[::-1]
        kind, offset = cursor.one("I"), cursor.one("Q")
        tensors.append(_Tensor(name, shape, kind, offset))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment < 2**16:
        raise ValueError(f"general.alignment={alignment!r} is not in [1, {2**16})")
    start = -(-cursor.at // alignment) * alignment
    if start > size:
        raise ValueError(f"it ends at byte {size}, before its tensors")
    _check_places(tensors, size - start, alignment)
    return _File(metadata, tuple(tensors), np.frombuffer(buffer, np.uint8, offset=start))


def _check_places(tensors: list[_Tensor], size: int, alignment: int) -> None:
    """Raises ValueError unless the tensors fill the file, one after another, as every writer leaves them.

    Otherwise a wrong offset or format would be read as another tensor's values.
    """
    end = 0
    for t in tensors:
        if t.offset != end:
            raise ValueError(f"tensor {t.name!r} starts at {t.offset}, not at {end}")
        stop = end + _nbytes(t)
        end = -(-stop // alignment) * alignment
        if stop > size:
            raise ValueError(f"tensor {t.name!r} ends {stop - size} bytes past the end of the file")
    if end < size:
        raise ValueError(f"its tensors end {size - end} bytes before the file does")


def _nbytes(tensor: _Tensor) -> int:
    block, size = _kind(tensor)[1:]
    return math.prod(tensor.shape) // block * size


def _kind(tensor: _Tensor) -> tuple[Any, int, int]:
    """A tensor's block format, with a block's values and bytes.

    Raises:
        ValueError: If the format is unknown, or the tensor no whole number of blocks.
    """
    try:
        import gguf
    except ImportError as e:
        raise ValueError("reading GGUF needs the gguf package: pip install gguf") from e
    kind = gguf.GGMLQuantizationType(tensor.kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if not tensor.shape or tensor.shape[-1] % block:
        raise ValueError(f"shape {list(tensor.shape)} is no whole number of {kind.name} blocks")
    return kind, block, size


def _load(file: _File, tensor: _Tensor) -> np.ndarray:
    """A tensor's values in float32.

    Raises:
        ValueError: If its block format cannot be read.
    """
    import gguf

    kind = _kind(tensor)[0]
    end = tensor.offset + _nbytes(tensor)
    rows = file.data[tensor.offset : end].reshape(*tensor.shape[:-1], -1)
    if kind == gguf.GGMLQuantizationType.F32:
        return rows.view(np.float32).copy()  # a view would follow later changes of the file
    if kind == gguf.GGMLQuantizationType.F16:
        return rows.view(np.float16).astype(np.float32)
    return gguf.dequantize(rows, kind).astype(np.float32, copy=False)


def read_config(path: Path) -> dict[str, Any]:
    """The file's metadata as a Hugging Face `config.json`.

    Raises:
        ValueError: For an unreadable file, another architecture, or metadata that is missing or that
            this reader does not know.
    """
    file = _open(path)
    try:
        return _config(file)
    except (ValueError, TypeError, OverflowError) as e:  # a value of another type than its key's
        raise ValueError(f"{path}: {one_line(e)}") from e


def _config(file: _File) -> dict[str, Any]:
    arch = file.get("general.architecture")
    if arch not in ("llama", "qwen3"):
        raise ValueError(f"architecture {arch!r} is not supported, only llama and qwen3")

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{arch}.{key}", default)

    names = {t.name for t in file.tensors}
    if get("rope.scaling.type", "none") != "none" or _ROPE_TABLE in names:
        raise ValueError("RoPE scaling in GGUF is not supported; use the Hugging Face checkpoint")
    if get("expert_count", 0):
        raise ValueError(f"{get('expert_count')} experts: mixtures are not supported in GGUF")
    width, heads = file.get(f"{arch}.embedding_length"), file.get(f"{arch}.attention.head_count")
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"head_count={heads!r} must be one positive integer")
    head_dim = get("attention.key_length", width // heads)
    if {get("attention.value_length", head_dim), get("rope.dimension_count", head_dim)} != {
        head_dim
    }:
        raise ValueError("keys, values and RoPE of different widths are not supported")
    return {
        "model_type": arch,
        "hidden_size": width,
        "intermediate_size": file.get(f"{arch}.feed_forward_length"),
        "num_hidden_layers": file.get(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(file.get("tokenizer.ggml.tokens")),
        "max_position_embeddings": file.get(f"{arch}.context_length"),
        # Stored in float32; the shortest decimal that gives it back is the original.
        "rms_norm_eps": float(
            str(np.float32(file.get(f"{arch}.attention.layer_norm_rms_epsilon")))
        ),
        "rope_theta": float(str(np.float32(get("rope.freq_base", 10000.0)))),
        "attention_bias": "blk.0.attn_q.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def read_stop_token_ids(path: Path) -> tuple[int, ...]:
    """The ids that end a text: end of sequence, and end of turn or message where the file has them.

    Raises:
        ValueError: For an unreadable file.
    """
    metadata = _open(path).metadata
    ids = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return token_ids(list(dict.fromkeys(i for i in ids if i is not None)), path)


def read_infos(path: Path) -> Iterator[TensorInfo]:
    """Yields the file's tensors, under their Hugging Face names, without their values.

    Raises:
        ValueError: For an unreadable file.
    """
    for tensor in _open(path).tensors:
        yield TensorInfo(_hf_name(tensor)[0], _kind(tensor)[0].name, tensor.shape, _nbytes(tensor))


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (Hugging Face name, float32 array), one tensor at a time.

    Raises:
        ValueError: For an unreadable or truncated file, or a tensor in an unknown format.
    """
    file, config = _open(path), read_config(path)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in file.tensors:
        name, part = _hf_name(tensor)
        try:
            value = _load(file, tensor)
            if config["model_type"] == "llama" and part in heads:
                value = _half_split(value, heads[part])
        # gguf's own answer to a format that it cannot dequantise is NotImplementedError.
        except (ValueError, KeyError, NotImplementedError) as e:
            raise ValueError(f"{path}: tensor {tensor.name!r} cannot be read: {one_line(e)}") from e
        yield name, value


def _hf_name(tensor: _Tensor) -> tuple[str, str | None]:
    """A tensor's Hugging Face name, or its own if unknown, for `assemble` to report; and its part of a layer."""
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

    metadata = _open(path).metadata

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
