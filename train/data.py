"""Training batches from a store of regenerated responses, in an order that a step number determines."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, Shaped

from train.store import Example, read_shard, shard_paths


@dataclasses.dataclass(frozen=True)
class Batch:
    """A few sequences, padded on the right.

    Attributes:
        tokens: int32 `[B, S]`.
        features: Taps `[B, S, C * D]`; rows past a sequence's end are zero and never seen.
        prompt_length: First position that is supervised.
        length: First position that is padding.
    """

    tokens: Int[np.ndarray, "B S"]
    features: Shaped[np.ndarray, "B S CD"]
    prompt_length: Int[np.ndarray, " B"]
    length: Int[np.ndarray, " B"]


def load_examples(folder: Path, target_layer_ids: Sequence[int]) -> list[Example]:
    """Every example of a store, held in memory.

    Raises:
        ValueError: If the folder has no shard, or a shard lacks a tap.
    """
    paths = shard_paths(folder)
    if not paths:
        raise ValueError(f"{folder} holds no responses; make them with python -m train.regenerate")
    return [example for path in paths for example in read_shard(path, target_layer_ids)]


def make_batch(examples: Sequence[Example], size: int) -> Batch:
    """Stacks examples into rows of `size` tokens; longer ones are cut."""
    B, width = len(examples), examples[0].features.shape[1]
    tokens = np.zeros((B, size), np.int32)
    features = np.zeros((B, size, width), examples[0].features.dtype)
    for row, example in enumerate(examples):
        n = min(len(example.tokens), size)
        tokens[row, :n] = example.tokens[:n]
        features[row, :n] = example.features[:n]
    prompt_length = np.array([e.prompt_length for e in examples], np.int32)
    length = np.array([min(len(e.tokens), size) for e in examples], np.int32)
    return Batch(tokens, features, prompt_length, length)


def batch_indices(step: int, count: int, batch_size: int, seed: int) -> np.ndarray:
    """Indices of step `step`'s examples: each epoch a fresh permutation, a last short batch left out.

    Raises:
        ValueError: If there are too few examples for one batch.
    """
    if count < batch_size:
        raise ValueError(f"{count} responses are fewer than {batch_size=}")
    per_epoch = count // batch_size
    epoch, position = divmod(step, per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(count)
    return order[position * batch_size : (position + 1) * batch_size]


def frequent_ids(examples: Sequence[Example], count: int) -> np.ndarray:
    """The `count` most frequent response tokens, most frequent first; ties go to the smaller id."""
    ids, counts = np.unique(
        np.concatenate([e.tokens[e.prompt_length :] for e in examples]), return_counts=True
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
