"""Experts' tensors: one each in a checkpoint, or fused by transformers 5; stacked leaves in our tree."""

import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

_STACK = re.compile(r"(.*/experts)/((?:gate|up|down)_proj/weight)")
_PART = re.compile(r"(.*/experts)/(\d+)/(.*)")
_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


def tensor_shapes(expected: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes by path of the tensors that make the leaves: `experts/gate_proj/weight` `[E, F, D]` is
    made of `experts/0/gate_proj/weight` `[F, D]` and so on."""
    parts = paths_of_stacks(expected)
    return {
        part: expected[path][1:] if path in parts else expected[path]
        for path in expected
        for part in parts.get(path, [path])
    }


def paths_of_stacks(expected: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """The tensors, by path, of each leaf that is a stack of them."""
    stacks = filter(None, map(_STACK.fullmatch, expected))
    return {s[0]: [f"{s[1]}/{e}/{s[2]}" for e in range(expected[s[0]][0])] for s in stacks}


def split_fused(tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields transformers 5's fused experts as views of one matrix each, and other tensors as they are.

    Source: transformers `Qwen3MoeExperts`: `gate_up_proj` `[E, 2F, D]`, the gate's rows first, and
    `down_proj` `[E, D, F]`.
    """
    for name, value in tensors:
        fused = _FUSED.fullmatch(name)
        if not fused or value.ndim != 3:
            yield name, value
            del value  # the next is read before it would be
            continue
        F = value.shape[1] // 2
        for e, matrix in enumerate(value):
            if fused[2] == "down_proj":
                yield f"{fused[1]}.{e}.down_proj.weight", matrix
            else:
                yield f"{fused[1]}.{e}.gate_proj.weight", matrix[:F]
                yield f"{fused[1]}.{e}.up_proj.weight", matrix[F:]
        value = matrix = None


def split_stack(path: str, leaf: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors that make a leaf, under their paths: views of a stack's experts, or the leaf itself."""
    stack = _STACK.fullmatch(path)
    if not stack:
        yield path, leaf
        return
    for e, matrix in enumerate(leaf):
        yield f"{stack[1]}/{e}/{stack[2]}", matrix


class Stacks:
    """Leaves under construction, each from its first expert to its last.

    Readers yield a file's experts one projection after another (`hf.read_tensors`), so one stack is
    open at a time; where shards divide a layer, at most its three.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]]):
        self.expected = expected
        self.open: dict[str, tuple[np.ndarray, set[int]]] = {}

    def add(self, path: str, value: np.ndarray) -> tuple[str, np.ndarray] | None:
        """Takes one tensor; returns a leaf and its path once it is whole.

        Raises:
            ValueError: If the experts of one leaf differ in dtype.
        """
        part = _PART.fullmatch(path)
        if not part:
            return path, value
        leaf, expert = f"{part[1]}/{part[3]}", int(part[2])
        if leaf not in self.open:
            self.open[leaf] = np.empty(self.expected[leaf], value.dtype), set(range(self.expected[leaf][0]))  # fmt: skip
        stack, waiting = self.open[leaf]
        if stack.dtype != value.dtype:
            raise ValueError(f"{path} holds {value.dtype}, but other experts {stack.dtype}")
        stack[expert] = value
        waiting.discard(expert)
        if waiting:
            return None
        del self.open[leaf]
        return leaf, stack
