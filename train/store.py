"""Training examples on disk: tokens, what is supervised, and the target's taps.

A store is a folder of safetensors shards with an index, readable without this project:

`00000.safetensors`, `00001.safetensors`, ... hold sequences end to end: `tokens` int32 `[total]`,
`supervised` bool `[total]`, `features` `[total, C * D]` (bfloat16 as the target writes them: the taps
of each position side by side, in the order of `target_layer_ids`), and `length` int32, one a sequence.
A sequence's last row of features is zero, since the target never read its last token. The metadata's
one entry, `examples`, is a JSON object of three lists: `ids`, `kinds` and `target_layer_ids`. Features of
width 0 stand for none.

`index.json` says what they belong to: `format` and `version` (see below); `target`, the sha256 of the
weights (`features.target_hash`); `tokenizer`, that of its vocabulary (`features.tokenizer_hash`);
`target_layer_ids`; `last_tap`, where a tap on the last layer is taken (`post_norm`: behind the final
norm, as in Hugging Face's `hidden_states[-1]`); `dtype` and `width` (C * D) of the features; and for
each shard its `file`, `sha256`, `examples` and `tokens`.

A shard appears by rename and counts once the index names it. Older shards, which have no index and
`prompt_length` in the place of `supervised`, are read by `read_shard`.
"""

import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

FORMAT, VERSION = "dflash-jax features", 1


@dataclasses.dataclass(frozen=True)
class Lazy:
    """An array that is read, or computed, each time that it is looked at.

    Attributes:
        shape: Of what `read` gives.
        read: Gives the array.
    """

    shape: tuple[int, int]
    read: Callable[[], np.ndarray]

    def __getitem__(self, key: Any) -> np.ndarray:
        return self.read()[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype)


@dataclasses.dataclass(frozen=True)
class Example:
    """A sequence to train on.

    Attributes:
        id: Of the prompt, or file and line; tells it from all others.
        kind: Of the prompt, or the file's name.
        tokens: int32 `[T]`.
        supervised: bool `[T]`, true on what the draft learns to predict.
        features: Taps `[T, C * D]`; the last token's row is zero, since the target never read it.
            Width 0 where there are none.
    """

    id: str
    kind: str
    tokens: np.ndarray
    supervised: np.ndarray
    features: np.ndarray | Lazy

    @classmethod
    def bare(cls, id: str, kind: str, tokens: np.ndarray, supervised: np.ndarray) -> "Example":
        """One without features."""
        return cls(id, kind, tokens, supervised, np.zeros((len(tokens), 0), ml_dtypes.bfloat16))

    @classmethod
    def response(
        cls, id: str, kind: str, tokens: np.ndarray, prompt_length: int, features: Any
    ) -> "Example":
        """One whose tokens behind the prompt are all supervised."""
        return cls(id, kind, tokens, np.arange(len(tokens)) >= prompt_length, features)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first supervised one."""
        return int(np.argmax(self.supervised)) if self.supervised.any() else len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Origin:
    """What features are of, besides their taps.

    Attributes:
        target: sha256 of the target's weights.
        tokenizer: sha256 of the vocabulary.
        last_tap: See `models.transformer.Transformer`.
    """

    target: str
    tokenizer: str
    last_tap: str = "post_norm"


def write_shard(
    folder: Path,
    index: int,
    examples: Sequence[Example],
    target_layer_ids: Sequence[int],
    origin: Origin | None = None,
) -> None:
    """Writes shard number `index` of `folder` and then its entry in the index, each atomically.

    Raises:
        ValueError: If the folder's other shards are of another origin, or other taps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "tokens": np.concatenate([e.tokens for e in examples]).astype(np.int32),
        "supervised": np.concatenate([e.supervised for e in examples]),
        "features": np.concatenate([np.asarray(e.features) for e in examples]),
        "length": np.array([len(e.tokens) for e in examples], np.int32),
    }
    of = {"target": None, "tokenizer": None, "last_tap": "post_norm"}
    head = {
        "format": FORMAT,
        "version": VERSION,
        **(of if origin is None else dataclasses.asdict(origin)),
        "target_layer_ids": list(target_layer_ids),
        "dtype": str(tensors["features"].dtype),
        "width": tensors["features"].shape[1],
    }
    shards = []
    if (folder / "index.json").exists():
        old = read_index(folder)
        shards = old.pop("shards")
        if differing := [key for key in head if old[key] != head[key]]:
            raise ValueError(
                f"{folder} holds shards with "
                + "; ".join(f"{key} {old[key]!r}, not {head[key]!r}" for key in differing)
            )
    lists = {
        "ids": [e.id for e in examples],
        "kinds": [e.kind for e in examples],
        "target_layer_ids": list(target_layer_ids),
    }
    partial, path = folder / f".{index:05d}.partial", folder / f"{index:05d}.safetensors"
    # One entry: safetensors writes several in any order, and the same shard must be the same bytes.
    save_file(tensors, str(partial), {"examples": json.dumps(lists)})
    entry = {
        "file": path.name,
        "sha256": file_hash(partial),
        "examples": len(examples),
        "tokens": len(tensors["tokens"]),
    }
    partial.rename(path)
    others = [s for s in shards if s["file"] != path.name]
    head["shards"] = sorted([*others, entry], key=lambda s: s["file"])
    partial = folder / ".index.partial"
    partial.write_text(json.dumps(head, indent=1))
    partial.rename(folder / "index.json")


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_index(folder: Path) -> dict[str, Any]:
    """A store's index.

    Raises:
        ValueError: If there is none, or it is none of this format and version.
    """
    path = folder / "index.json"
    try:
        index = json.loads(path.read_text())
        found = index["format"], index["version"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path} is no index of features: {e}") from e
    if found != (FORMAT, VERSION):
        raise ValueError(f"{path} is of {found}, not {(FORMAT, VERSION)}")
    return index


def shard_paths(folder: Path) -> list[Path]:
    """The shards that the folder's index names, in order; none without an index."""
    if not (folder / "index.json").exists():
        return []
    return [folder / shard["file"] for shard in read_index(folder)["shards"]]


def read_ids(folder: Path) -> set[str]:
    """Ids of every prompt that already has its response."""
    ids: set[str] = set()
    for path in shard_paths(folder):
        with safe_open(str(path), "np") as f:
            ids.update(_lists(f)["ids"])
    return ids


def _lists(file: Any) -> dict[str, list]:
    """A shard's lists; the older layout has an entry for each."""
    entries = {key: json.loads(text) for key, text in file.metadata().items()}
    return entries.get("examples", entries)


def load_examples(
    folder: Path, target_layer_ids: Sequence[int], origin: Origin | None = None
) -> list[Example]:
    """Every example of a store: tokens in memory, features read when they are looked at.

    The first look at a shard's features compares its checksum and goes over all their values.

    Args:
        folder: Of shards and their index.
        target_layer_ids: Taps wanted, in this order.
        origin: What the features must be of; None takes them as they are.

    Raises:
        ValueError: If the folder has no shard, or they lack a tap or are of another origin. On the first
            look at the features: if they are not what was written, zero, or not finite.
    """
    if not shard_paths(folder):
        raise ValueError(
            f"{folder} holds no responses or features; make them with python -m train.regenerate"
            " or train.features"
        )
    index = read_index(folder)
    for key, value in ({} if origin is None else dataclasses.asdict(origin)).items():
        if index[key] != value:
            raise ValueError(
                f"{folder / 'index.json'}: the features' {key} is {index[key]}, not {value}"
            )
    shards = [Shard(folder / s["file"], s["sha256"]) for s in index["shards"]]
    return [example for shard in shards for example in shard.examples(target_layer_ids)]


def read_shard(path: Path, target_layer_ids: Sequence[int] = ()) -> list[Example]:
    """A shard's examples, without the index's checksum; the older layout too.

    Raises:
        ValueError: See `Shard`.
    """
    return Shard(path).examples(target_layer_ids)


class Shard:
    """One file of a store; its features are read a sequence at a time.

    Args:
        path: The file.
        sha256: Checksum that it must have; None for any.

    Raises:
        ValueError: If it cannot be read, or its arrays are not of one length.
    """

    def __init__(self, path: Path, sha256: str | None = None):
        self.path, self.sha256 = path, sha256
        self._verified, self._lock = False, threading.Lock()
        try:
            self._file = safe_open(str(path), "np")
            lists = _lists(self._file)
            self.ids, self.kinds, self.taps = (
                lists[k] for k in ("ids", "kinds", "target_layer_ids")
            )
            self.tokens = self._file.get_tensor("tokens")
            self.ends = np.cumsum(self._file.get_tensor("length"), dtype=np.int64)
            self.starts = np.concatenate([[0], self.ends[:-1]])
            self.supervised = self._supervised()
            self._features = self._file.get_slice("features")
        except (SafetensorError, OSError, KeyError, ValueError, AttributeError) as e:
            raise ValueError(f"{path} is no shard of examples: {e}") from e
        self.rows, self.width = self._features.get_shape()
        counts = {
            "tokens": len(self.tokens), "supervised": len(self.supervised), "features": self.rows,
            "length": int(self.ends[-1]),
        }  # fmt: skip
        if len(set(counts.values())) > 1 or not len(self.ids) == len(self.kinds) == len(self.ends):
            raise ValueError(f"{path}: arrays of different lengths: {counts}, {len(self.ids)} ids")
        if self.width % max(len(self.taps), 1):
            raise ValueError(f"{path}: features of width {self.width} are no {len(self.taps)} taps")

    def _supervised(self) -> np.ndarray:
        if "supervised" in self._file.keys():  # noqa: SIM118
            return self._file.get_tensor("supervised")
        position = np.arange(len(self.tokens)) - np.repeat(self.starts, self.ends - self.starts)
        prompts = self._file.get_tensor("prompt_length")
        return position >= np.repeat(prompts, self.ends - self.starts)

    def examples(self, target_layer_ids: Sequence[int]) -> list[Example]:
        """The shard's examples with the wanted taps.

        Raises:
            ValueError: If the shard lacks one of the taps.
        """
        missing = sorted(set(target_layer_ids) - set(self.taps))
        if missing:
            raise ValueError(f"{self.path} holds taps {self.taps}, not {missing}")
        columns = self._columns(target_layer_ids)
        out = []
        for i, (start, end) in enumerate(zip(self.starts.tolist(), self.ends.tolist())):
            width = self.width if columns is None else len(columns)
            features = Lazy((end - start, width), lambda a=start, b=end: self.read(a, b, columns))
            tokens, supervised = self.tokens[start:end], self.supervised[start:end]
            out.append(Example(self.ids[i], self.kinds[i], tokens, supervised, features))
        return out

    def _columns(self, target_layer_ids: Sequence[int]) -> np.ndarray | None:
        """Which columns are those of the wanted taps; None for all."""
        if list(target_layer_ids) == self.taps:
            return None
        width = self.width // max(len(self.taps), 1)
        each = [np.arange(width) + self.taps.index(i) * width for i in target_layer_ids]
        return np.concatenate(each) if each else np.zeros(0, int)

    def read(self, start: int, end: int, columns: np.ndarray | None) -> np.ndarray:
        """Features of a sequence, once the shard is verified."""
        with self._lock:
            if not self._verified:
                self._verify()
                self._verified = True
        features = self._features[start:end]
        return features if columns is None else features[:, columns]

    def _verify(self) -> None:
        """Raises ValueError unless the file is the one written, and its features those of a target."""
        if self.sha256 is not None and (found := file_hash(self.path)) != self.sha256:
            raise ValueError(f"{self.path} has the sha256 {found}, not the index's {self.sha256}")
        if not self.width:
            return
        for name, start, end in zip(self.ids, self.starts.tolist(), self.ends.tolist()):
            taps = self._features[start:end].reshape(end - start, len(self.taps), -1)
            finite = np.isfinite(taps).all(axis=(1, 2))
            if not finite.all():
                row = int(np.argmin(finite))
                raise ValueError(
                    f"{self.path}: features of {name!r} at position {row} are not finite"
                )
            empty = ~taps[:-1].any(axis=2)
            if empty.any():
                row, tap = np.argwhere(empty)[0]
                raise ValueError(
                    f"{self.path}: features of {name!r} are all zero at position {row}, tap {self.taps[tap]}"
                )
