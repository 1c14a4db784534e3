"""What a checkpoint says of itself, gathered without keeping its weights, for `findings` to judge."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dflash_jax.checkpoint import gguf, hf, keys, orbax
from dflash_jax.checkpoint.files import TensorInfo, one_line, pad_id, understand
from dflash_jax.checkpoint.values import value_fault
from dflash_jax.checkpoint.wrappers import read_target_tensors
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.config.dialects import is_nested


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """What is known of a checkpoint.

    Attributes:
        path: Its folder or file.
        kind: "target" or "draft".
        form: How it is written: Hugging Face's own form (targets), a flat or nested draft, Orbax, GGUF.
        raw: Its `config.json`, as it stands; a GGUF file's metadata in that form; empty for Orbax.
        config: What our reader makes of it; None if it refuses.
        refusals: What our readers said of parts that they refuse, by part: "config", "tensors" and so on.
        tensors: Every tensor, without its values.
        faults: What is wrong with them, and with their values.
        stop_token_ids: Of a target.
        pad_token_id: Of a target, if it is given.
        tokenizer: As transformers has it, or None.
        all_files: Whether the folder holds whatever its author put there; a download leaves out code.
        target: The target that a draft is judged with, or None.
    """

    path: Path
    kind: Literal["target", "draft"]
    form: Literal["hf", "flat", "nested", "orbax", "gguf"]
    raw: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: TargetConfig | DraftConfig | None = None
    refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tensors: tuple[TensorInfo, ...] = ()
    faults: tuple[keys.Fault, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    tokenizer: Any = None
    all_files: bool = True
    target: "Facts | None" = None

    @property
    def shape(self) -> Mapping[str, Any]:
        """The part of the config that describes the layers."""
        return self.part("transformer_layer_config") if self.form == "nested" else self.raw

    @property
    def inner(self) -> Mapping[str, Any]:
        """`dflash_config` of a flat draft; empty where it is none."""
        return self.part("dflash_config")

    def said(self, key: str) -> Any:
        """A draft's key, which the flat dialect may have in `dflash_config`; None if nowhere."""
        value = self.inner.get(key) if self.form == "flat" else None
        return self.raw.get(key) if value is None else value

    def integer(self, key: str) -> int | None:
        """`said`, if it is an integer."""
        value = self.said(key)
        return value if type(value) is int else None

    def part(self, key: str) -> Mapping[str, Any]:
        """An object of the config; empty where it is none."""
        part = self.raw.get(key)
        return part if isinstance(part, dict) else {}

    @property
    def architectures(self) -> list[str]:
        """The class names that the config gives."""
        names = self.raw.get("architectures")
        return [n for n in names if isinstance(n, str)] if isinstance(names, list) else []


class _Reader:
    """Calls our readers and keeps what they refuse."""

    def __init__(self):
        self.refusals: dict[str, str] = {}

    def get(self, part: str, read: Callable[[], Any], default: Any) -> Any:
        try:
            return read()
        except ValueError as e:
            self.refusals[part] = one_line(e, 2000)
            return default


def gather(
    path: Path, target: Facts | None = None, *, values: bool = True, all_files: bool = True
) -> Facts:
    """The facts of a checkpoint.

    Args:
        path: A folder or a GGUF file.
        target: Of a draft.
        values: Whether to look at every weight, one tensor at a time, or only at names and shapes.
        all_files: See `Facts`.

    Raises:
        ValueError: If there is no checkpoint at all.
    """
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(f"{path} is a file; a checkpoint is a folder or a .gguf file")
    read = _Reader()
    if path.is_file():
        facts = _gguf(path, read)
    elif orbax.is_checkpoint(path):
        facts = _orbax(path, read)
    else:
        facts = _hugging_face(path, read, target)
    tokenizer = read.get("tokenizer", lambda: _tokenizer(path), None)
    modules = {"gguf": gguf, "orbax": orbax}
    source = modules.get(facts.form, hf)
    tensors = read.get("tensors", lambda: tuple(source.read_infos(path)), ())
    config = facts.config
    if facts.form in ("flat", "nested") and isinstance(config, DraftConfig):
        config = keys.own_tensors(config, (t.name for t in tensors))
    faults = ()
    if values and tensors:
        stored = keys.expected_shapes(config) if config and facts.form == "orbax" else None
        text = facts.form == "hf" and isinstance(config, TargetConfig)
        given = read_target_tensors(path, facts.raw, config) if text else source.read_tensors(path)
        faults = read.get("tensors", lambda: _faults(given, config, stored), ())
    return dataclasses.replace(
        facts, config=config, tensors=tensors, faults=faults, tokenizer=tokenizer, target=target,
        refusals=dict(read.refusals), all_files=all_files,
    )  # fmt: skip


def _gguf(path: Path, read: _Reader) -> Facts:
    raw = gguf.read_config(path)
    config = read.get("config", lambda: understand(path, TargetConfig.from_hf, raw), None)
    stop = read.get("eos_token_id", lambda: gguf.read_stop_token_ids(path), ())
    pad = read.get("pad_token_id", lambda: pad_id(raw, path), None)
    return Facts(path, "target", "gguf", raw, config, stop_token_ids=stop, pad_token_id=pad)


def _orbax(path: Path, read: _Reader) -> Facts:
    header = orbax.read_header(path)
    return Facts(
        path, header.kind, "orbax", config=header.config, stop_token_ids=header.stop_token_ids,
        pad_token_id=header.pad_token_id,
    )  # fmt: skip


def _hugging_face(path: Path, read: _Reader, target: Facts | None) -> Facts:
    raw = hf.read_config(path)
    if not hf.is_draft(raw):
        pad = read.get("pad_token_id", lambda: pad_id(raw, path), None)
        config = read.get("config", lambda: understand(path, TargetConfig.from_hf, raw), None)
        stop = read.get("eos_token_id", lambda: hf.read_stop_token_ids(path, raw), ())
        return Facts(path, "target", "hf", raw, config, stop_token_ids=stop, pad_token_id=pad)
    depth = target.config.num_hidden_layers if target and target.config else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a finding says it better
        build = lambda: understand(path, DraftConfig.from_hf, raw, num_target_layers=depth)
        config = read.get("config", build, None)
    form = "nested" if is_nested(raw) else "flat"
    return Facts(path, "draft", form, raw, config)


def _tokenizer(path: Path) -> Any:
    if path.is_file():
        return gguf.read_tokenizer(path)
    return hf.load_tokenizer(path) if hf.tokenizer_files(path) else None


def _faults(
    tensors: Iterator[tuple[str, np.ndarray]],
    config: TargetConfig | DraftConfig | None,
    shapes: Mapping[str, tuple[int, ...]] | None,
) -> tuple[keys.Fault, ...]:
    """Faults of the tensors; of their values alone where no config says what they should be."""
    if config is not None:
        return tuple(keys.find_faults(tensors, config, shapes))
    floats = ((name, value) for name, value in tensors if value.dtype.kind not in "iub")
    found = ((name, value.shape, value_fault(value)) for name, value in floats)
    return tuple(
        keys.Fault("values", name, f"{name} {list(shape)} {fault}")
        for name, shape, fault in found
        if fault
    )
