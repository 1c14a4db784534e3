"""Leaves of a mapped checkpoint onto devices: each process reads the parts that its devices hold, and no others.

Names, shapes and dtypes are checked before anything is read; values where the leaves lie.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dflash_jax.checkpoint import keys, values
from dflash_jax.checkpoint.experts import paths_of_stacks, split_fused, tensor_shapes
from dflash_jax.config import DraftConfig, TargetConfig

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """The experts of one projection as a leaf `[E, out, in]` that is read by its parts."""

    experts: list[np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.experts), *self.experts[0].shape

    @property
    def dtype(self) -> np.dtype:
        return self.experts[0].dtype

    def __getitem__(self, index: Index) -> np.ndarray:
        chosen, *rest = index
        return np.stack([expert[tuple(rest)] for expert in self.experts[chosen]])


def stream(
    tensors: Iterable[tuple[str, np.ndarray]],
    config: TargetConfig | DraftConfig,
    source: object,
    dtype: DTypeLike | None,
    placement: keys.Placement,
) -> Iterator[tuple[str, jax.Array]]:
    """`keys.stream`, or `keys.stream_draft`, of `hf.map_tensors`, onto devices.

    Args:
        tensors: Pairs (Hugging Face name, view of a mapped file).
        config: Of the model; a draft's as `keys.own_tensors` gives it.
        source: Names the checkpoint in errors.
        dtype: Of the leaves, each part is cast as it is read; None keeps each tensor's own.
        placement: Of the leaves; not None.

    Raises:
        ValueError: As `keys.stream_draft`, before anything is read if names, shapes or dtypes are wrong.
    """
    leaves = _leaves(tensors, config, source)
    head = leaves.pop(keys.HEAD, None) if keys.is_tied(keys.expected_shapes(config)) else None

    def placed() -> Iterator[tuple[str, jax.Array]]:
        for path in list(leaves):
            value = leaves.pop(path)  # its file is mapped no longer than needed
            place = keys.sharding_of(path, value.shape, placement)
            if path == keys.EMBEDDING and head is not None and not _equal(value, head, place):
                raise ValueError(f"{source}: {keys.UNTIED}")
            yield path, _put(value, place, np.int32 if path == keys.OFFSETS else dtype)

    expected = keys.expected_shapes(config)
    yield from keys.checked(
        placed(), config, source, lambda path: keys.name_of(path, keys.prefix_of(expected))
    )


def read_part(value: Any, index: Index, dtype: DTypeLike | None) -> np.ndarray:
    """A copy of one part of a mapped tensor; nothing else of it is read."""
    return np.array(value[index], value.dtype if dtype is None else dtype)


def _put(value: Any, place: Any, dtype: DTypeLike | None) -> jax.Array:
    parts: dict[str, np.ndarray] = {}  # devices may hold the same one

    def part(index: Any) -> np.ndarray:
        if str(index) not in parts:
            parts[str(index)] = read_part(value, index, dtype)
        return parts[str(index)]

    return jax.make_array_from_callback(value.shape, place, part)


def _equal(embedding: Any, head: Any, place: Any) -> bool:
    """Whether a tied target's head is its embedding, so that all processes agree about it."""
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return False
    return bool(jax.jit(jnp.array_equal)(*(_put(x, place, None) for x in (embedding, head))))


def _leaves(
    tensors: Iterable[tuple[str, np.ndarray]], config: TargetConfig | DraftConfig, source: object
) -> dict[str, Any]:
    """The tensors by path, experts as `Stack`s, and a tied target's head if there is one.

    Raises:
        ValueError: For what `stream` checks first.
    """
    expected = keys.expected_shapes(config)
    audit, found = keys.Audit(tensor_shapes(expected)), {}
    tied, reduced = keys.is_tied(expected), keys.OFFSETS in expected
    masks: list[np.ndarray] = []
    for name, value in split_fused(tensors):
        path = keys.path_of(name)
        if name.endswith(keys.BUFFER):
            continue
        if reduced and path == keys.MASK:
            masks.append(np.array(value))
        elif tied and path == keys.HEAD:
            found[path] = value
        elif audit.fits(name, path, value.shape):
            audit.holds(
                name, value, values.integer_fault if path == keys.OFFSETS else values.float_fault
            )
            found[path] = value
    audit.refuse(source, lambda path: keys.name_of(path, keys.prefix_of(expected)))
    if reduced and isinstance(config, DraftConfig):
        keys.refuse(source, keys.vocabulary_faults(config, found[keys.OFFSETS], *masks))
    for path, experts in paths_of_stacks(expected).items():
        found[path] = Stack([found.pop(expert) for expert in experts])
        dtypes = sorted({str(x.dtype) for x in found[path].experts})
        if len(dtypes) > 1:
            raise ValueError(
                f"{source}: {path} holds experts of different dtypes: {', '.join(dtypes)}"
            )
    return found
