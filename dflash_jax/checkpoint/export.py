"""Writes drafts and targets as Hugging Face folders, which other systems load."""

import functools
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dflash_jax import array_typing as at
from dflash_jax.checkpoint import hf, keys, orbax
from dflash_jax.checkpoint.experts import split_stack
from dflash_jax.checkpoint.files import atomic_folder, write_json
from dflash_jax.checkpoint.stream import SHARD_BYTES, write_tensors
from dflash_jax.config import DraftConfig, TargetConfig, write_flat, write_nested, write_target

Dialect = Literal["zlab", "speculators"]
DIALECTS: tuple[Dialect, ...] = ("zlab", "speculators")


def save_draft(
    folder: str | Path,
    config: DraftConfig,
    params: at.Params,
    dtype: DTypeLike | None = jnp.bfloat16,
    *,
    dialect: Dialect = "zlab",
    verifier: str | None = None,
) -> None:
    """`write` for a draft's parameter tree, which is checked first.

    Args:
        dtype: Of the tensors; published drafts are bfloat16. None keeps each tensor's own.
    """
    keys.check_params(params, config, "the parameters to export")
    given = _cast(params, dtype)
    write(folder, orbax.Header("draft", config), *given, dialect=dialect, verifier=verifier)


def save_target(
    folder: str | Path,
    config: TargetConfig,
    params: at.Params,
    dtype: DTypeLike | None = None,
    *,
    stop_token_ids: Sequence[int] = (),
    pad_token_id: int | None = None,
    tokenizer_files: Sequence[Path] = (),
) -> None:
    """`write` for a target's parameter tree, which is checked first.

    Args:
        dtype: Of the tensors; None keeps each tensor's own.
    """
    keys.check_params(params, config, "the parameters to export")
    header = orbax.Header("target", config, tuple(stop_token_ids), pad_token_id)
    write(folder, header, *_cast(params, dtype), tokenizer_files=tokenizer_files)


def _cast(
    params: at.Params, dtype: DTypeLike | None
) -> tuple[Iterator[tuple[str, np.ndarray]], dict[str, jax.ShapeDtypeStruct]]:
    """The leaves in another dtype, and their shapes."""
    leaves = keys.flatten(params)
    kept = {
        path: leaf.dtype if dtype is None or path == keys.OFFSETS else jnp.dtype(dtype)
        for path, leaf in leaves.items()
    }
    shapes = {path: jax.ShapeDtypeStruct(x.shape, kept[path]) for path, x in leaves.items()}
    return ((p, np.asarray(x).astype(kept[p], copy=False)) for p, x in leaves.items()), shapes


def write(
    folder: str | Path,
    header: orbax.Header,
    leaves: Iterable[tuple[str, Any]],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    dialect: Dialect = "zlab",
    verifier: str | None = None,
    tokenizer_files: Sequence[Path] = (),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a Hugging Face folder, one leaf at a time; it appears whole or not at all.

    `config.json` and the tensors; a target has `generation_config.json` and its tokenizer's files too.

    Args:
        folder: Must not exist.
        leaves: Pairs (path, array), already checked.
        shapes: Of the leaves, by path.
        dialect: A draft's: "zlab", the flat one, which every known consumer reads, or "speculators".
        verifier: For speculators: the target's hub id or folder.
        tokenizer_files: Copied beside a target's parameters.
        shard_bytes: Above it there are several files, and their index.

    Raises:
        ValueError: If the folder exists, `leaves` raises it, or the form cannot say all of the config.
    """
    config, special = header.config, (header.stop_token_ids, header.pad_token_id)
    floats = {x.dtype for x in shapes.values() if jnp.issubdtype(x.dtype, jnp.floating)}
    dtype, files = jnp.result_type(*floats).name, {}
    if isinstance(config, DraftConfig):
        files["config.json"] = draft_json(config, dtype, dialect, verifier)
        tokenizer_files = ()
    else:
        files["config.json"] = target_json(config, dtype, *special)
        files["generation_config.json"] = _special(*special)
    with atomic_folder(folder) as temporary:
        for name, value in files.items():
            write_json(temporary / name, value)
        for file in tokenizer_files:
            shutil.copyfile(file, temporary / file.name)
        named = functools.partial(tensors, config)
        write_tensors(temporary, leaves, shapes, named, shard_bytes)


def tensors(
    config: TargetConfig | DraftConfig,
    leaves: Iterable[tuple[str, Any]],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (Hugging Face name, array) of a checkpoint's tensors, from one leaf after another.

    Experts are unstacked, and a reduced vocabulary's `d2t` (int64) is followed by its `t2d`.

    Args:
        config: Whose leaves they are.
        leaves: Pairs (path, array) as of `keys.flatten`; each may be read when it is asked for.
    """
    prefix = "model." if isinstance(config, TargetConfig) else ""
    for path, leaf in leaves:
        if path == keys.OFFSETS:
            offsets = np.asarray(leaf).astype(np.int64)
            mask = np.zeros(config.vocab_size, bool)
            mask[np.arange(len(offsets)) + offsets] = True
            yield "d2t", offsets
            yield "t2d", mask
            continue
        for part, value in split_stack(path, np.asarray(leaf)):
            yield keys.name_of(part, prefix), value
        leaf = value = None  # not held while the next is read


def draft_json(
    config: DraftConfig, dtype: str, dialect: Dialect = "zlab", verifier: str | None = None
) -> dict[str, Any]:
    """A draft's whole `config.json`; see `save_draft`."""
    if dialect not in DIALECTS:
        raise ValueError(f"{dialect=} must be one of {DIALECTS}")
    if dialect == "zlab" and verifier is not None:
        raise ValueError(f"{verifier=} cannot be said in the flat dialect")
    written = write_flat(config) if dialect == "zlab" else write_nested(config, verifier)
    return {**written, "dtype": dtype, "torch_dtype": dtype}


def target_json(
    config: TargetConfig,
    dtype: str,
    stop_token_ids: Sequence[int] = (),
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """A target's whole `config.json`; see `save_target`."""
    special = _special(stop_token_ids, pad_token_id)
    return {**write_target(config), **special, "dtype": dtype, "torch_dtype": dtype}


def _special(stop_token_ids: Sequence[int], pad_token_id: int | None) -> dict[str, Any]:
    stop = stop_token_ids[0] if len(stop_token_ids) == 1 else list(stop_token_ids) or None
    return {"eos_token_id": stop, "pad_token_id": pad_token_id}


# Keys that say one thing together: equal if the configs that are read from them agree in it.
_SPELLINGS: tuple[tuple[frozenset[str], Callable[[Any], Any]], ...] = (
    (
        frozenset(("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor")),
        lambda c: c.rope,
    ),
    (
        frozenset(("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "use_swa", "swa_window_size")),
        lambda c: [c.window(i) for i in range(c.num_hidden_layers)],
    ),
    (
        frozenset(("is_causal", "causal", "sliding_window_non_causal")),
        lambda c: [c.causal(i) for i in range(c.num_hidden_layers)],
    ),
)  # fmt: skip
# What a key that is not written stands for; transformers' own defaults.
_ABSENT = {
    "use_cache": True, "initializer_range": 0.02, "pretraining_tp": 1, "attention_bias": False, "mlp_bias": False,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "sample_from_anchor": False,
    "input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0, "use_swa": False,
}  # fmt: skip
_ALIASES = {"torch_dtype": "dtype", "num_local_experts": "num_experts"}
# Objects whose keys are compared one by one; those of the first two mean the same at the top level.
_MERGED = ("dflash_config", "text_config")
_OBJECTS = (*_MERGED, "transformer_layer_config", "speculators_config", "verifier")


def not_kept(raw: Mapping[str, Any], written: Mapping[str, Any]) -> list[str]:
    """Names of the keys of a source's `config.json` that what is written for it lost or changed.

    A null, and a default that is left out, are kept; so are RoPE, windows and causality in another
    spelling.

    Args:
        raw: Of a checkpoint that was read.
        written: `draft_json` or `target_json` of the same dialect.
    """
    old, new = _configs(raw, written)
    found = {key: value for _, key, value in _entries(written)}

    def kept(key: str, value: Any) -> bool:
        bare = key.rpartition(".")[2]
        for names, meaning in _SPELLINGS:
            if bare in names:
                return meaning(old) == meaning(new)
        if key in found and bare == "eos_token_id":  # the generation config may have more
            return set(np.atleast_1d(value)) <= set(np.atleast_1d(found[key]))
        return found[key] == value if key in found else _ABSENT.get(bare) == value

    return sorted(name for name, key, value in _entries(raw) if not kept(key, value))


def _configs(raw: Mapping[str, Any], written: Mapping[str, Any]) -> tuple[Any, Any]:
    """Both as they are read; what the caller of the conversion gave stands in the written one."""
    if not hf.is_draft(written):
        return TargetConfig.from_hf(raw), TargetConfig.from_hf(written)
    with warnings.catch_warnings(action="ignore"):  # the reader has told
        new = DraftConfig.from_hf(written)
        return DraftConfig.from_hf(raw, new.target_layer_ids), new


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(name, the key that it is compared under, value) of all that is not null."""
    for name, value in config.items():
        if isinstance(value, Mapping) and name in _OBJECTS:
            for inner, key, v in _entries(value):
                yield f"{name}.{inner}", key if name in _MERGED else f"{name}.{key}", v
        elif value is not None and not name.startswith("_"):
            yield name, _ALIASES.get(name, name), value
