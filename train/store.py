"""Regenerated responses with the target's features, in shards on disk.

A shard is one safetensors file. Sequences lie end to end: `tokens` int32 `[total]` (prompt and
response), `features` `[total, C * D]` (the taps of each position, in the order of the metadata's
`target_layer_ids`), and for each sequence its `length` and `prompt_length`. The metadata holds the
prompts' ids and kinds as JSON lists. Shards appear by rename, so a shard that is there is whole.
A shard without taps (features of width 0) holds responses only; `regenerate.replay` computes their
features again.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes  # noqa: F401  (teaches numpy, hence safetensors, bfloat16)
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt with the target's response.

    Attributes:
        id: The prompt's id.
        kind: The prompt's kind.
        tokens: Prompt and response, int32 `[T]`.
        prompt_length: Tokens of the prompt.
        features: Taps `[T, C * D]`; the last token's row is zero, since the target never read it.
    """

    id: str
    kind: str
    tokens: np.ndarray
    prompt_length: int
    features: np.ndarray


def write_shard(
    folder: Path, index: int, examples: Sequence[Example], target_layer_ids: Sequence[int]
) -> None:
    """Writes shard number `index` of `folder`, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "tokens": np.concatenate([e.tokens for e in examples]).astype(np.int32),
        "features": np.concatenate([e.features for e in examples]),
        "length": np.array([len(e.tokens) for e in examples], np.int32),
        "prompt_length": np.array([e.prompt_length for e in examples], np.int32),
    }
    metadata = {
        "ids": json.dumps([e.id for e in examples]),
        "kinds": json.dumps([e.kind for e in examples]),
        "target_layer_ids": json.dumps(list(target_layer_ids)),
    }
    partial = folder / f".{index:05d}.partial"
    save_file(tensors, str(partial), metadata)
    partial.rename(folder / f"{index:05d}.safetensors")


def shard_paths(folder: Path) -> list[Path]:
    """The folder's whole shards, in order."""
    return sorted(folder.glob("[0-9]*.safetensors"))


def read_ids(folder: Path) -> set[str]:
    """Ids of every prompt that already has its response."""
    ids: set[str] = set()
    for path in shard_paths(folder):
        with safe_open(str(path), "np") as f:
            ids.update(json.loads(f.metadata()["ids"]))
    return ids


def read_shard(path: Path, target_layer_ids: Sequence[int]) -> Iterator[Example]:
    """Yields a shard's examples with the features of the wanted taps.

    Raises:
        ValueError: If the shard lacks one of the taps, or its features are not of so many.
    """
    with safe_open(str(path), "np") as f:
        metadata = f.metadata()
        tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
    stored = json.loads(metadata["target_layer_ids"])
    missing = sorted(set(target_layer_ids) - set(stored))
    if missing:
        raise ValueError(f"{path} holds taps {stored}, not {missing}")
    features = tensors["features"]
    if features.shape[1] % max(len(stored), 1):
        raise ValueError(f"{path}: features of width {features.shape[1]} are no {len(stored)} taps")
    if list(target_layer_ids) != stored:
        width = features.shape[1] // len(stored)
        columns = [np.arange(width) + stored.index(i) * width for i in target_layer_ids]
        features = features[:, np.concatenate(columns)] if columns else features[:, :0]
    ids, kinds = json.loads(metadata["ids"]), json.loads(metadata["kinds"])
    ends = np.cumsum(tensors["length"])
    for i, (end, length) in enumerate(zip(ends, tensors["length"])):
        rows = slice(end - length, end)
        prompt_length = int(tensors["prompt_length"][i])
        yield Example(ids[i], kinds[i], tensors["tokens"][rows], prompt_length, features[rows])
