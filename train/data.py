"""Training batches: which examples a step takes, and how they lie in its rows."""

import dataclasses
import functools
import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int, Shaped, UInt32

from train.packing import lay_out
from train.store import Example

try:
    from grain import MapDataset
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f'training needs {e.name}: pip install -e ".[train]"') from e


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of examples end to end, padded on the right.

    Attributes:
        tokens: int32 `[B, S]`.
        supervised: bool `[B, S]`, false on padding.
        documents: int32 `[B, S]`, which of its row's examples a position is of; -1 for padding.
        numbers: uint32 `[B, S]`, `number` of the example that a position is of; 0 for padding.
    """

    tokens: Int[np.ndarray, "B S"]
    supervised: Bool[np.ndarray, "B S"]
    documents: Int[np.ndarray, "B S"]
    numbers: UInt32[np.ndarray, "B S"]


def number(example: Example) -> int:
    """What stands for an example in the keys of its noise: its id's checksum, whatever its place."""
    return zlib.crc32(example.id.encode())


def make_batch(rows: Sequence[Sequence[Example]], size: int) -> Batch:
    """Stacks rows of examples into rows of `size` tokens; longer examples are cut.

    Raises:
        ValueError: If a row's examples are more than `size` together.
    """

    def each(value, dtype, fill=0):
        parts = [[np.asarray(value(i, e), dtype)[:size] for i, e in enumerate(row)] for row in rows]
        return lay_out(parts, size, fill)

    return Batch(
        each(lambda i, e: e.tokens, np.int32),
        each(lambda i, e: e.supervised, bool),
        each(lambda i, e: np.full(len(e.tokens), i), np.int32, -1),
        each(lambda i, e: np.full(len(e.tokens), number(e)), np.uint32),
    )


def stack_features(rows: Sequence[Sequence[Example]], size: int) -> Shaped[np.ndarray, "B S CD"]:
    """The features of `make_batch`'s rows; those behind a row's end are zero and never seen."""
    return lay_out([[np.asarray(e.features)[:size] for e in row] for row in rows], size)


@functools.lru_cache(maxsize=4)
def _order(count: int, batch_size: int, seed: int) -> MapDataset:
    shuffled = MapDataset.range(count).shuffle(seed=seed)
    return shuffled.batch(batch_size, drop_remainder=True).repeat()


def batch_indices(step: int, count: int, batch_size: int, seed: int) -> np.ndarray:
    """Which rows step `step` takes: each epoch a fresh permutation, a last short batch left out.

    A position in the data is a step's number, so there is none to save.

    Raises:
        ValueError: If there are too few examples for one batch.
    """
    if count < batch_size:
        raise ValueError(f"{count} rows of examples are fewer than {batch_size=}")
    return np.asarray(_order(count, batch_size, seed)[step])


def frequent_ids(examples: Sequence[Example], count: int) -> np.ndarray:
    """The `count` most frequent supervised tokens, most frequent first; ties go to the smaller id."""
    ids, counts = np.unique(
        np.concatenate([e.tokens[e.supervised] for e in examples]), return_counts=True
    )
    return ids[np.argsort(-counts, kind="stable")][:count]


def candidate_ids(
    labels: np.ndarray, frequent: np.ndarray, vocab_size: int, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Head rows that a step's loss runs over: its labels, the frequent ids and random others.

    Returns:
        `count` distinct ids, ascending, or all if the vocabulary is smaller; fewer distinct labels
        and frequent ids leave more to chance.

    Raises:
        ValueError: If labels and frequent ids alone are more than `count`.
    """
    fixed = np.union1d(labels, frequent)
    if len(fixed) > count:
        raise ValueError(
            f"{len(fixed)} labels and frequent ids are more than the {count} head rows of a step"
        )
    drawn = rng.choice(vocab_size, size=min(vocab_size, 2 * count), replace=False)
    others = drawn[~np.isin(drawn, fixed)]  # in the order drawn: sorted, a cut would keep small ids
    return np.sort(np.concatenate([fixed, others[: count - len(fixed)]])).astype(np.int32)
