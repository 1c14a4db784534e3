"""Several short documents in one row, none of which sees or teaches another.

`documents` `[B, S]` numbers a row's documents from 0 and is -1 on padding; `anchors.py`, `step.py` and
`ops/mask.py` take it from there. Features are those of each document alone, laid out like its tokens.
"""

import bisect
from collections.abc import Sequence

import numpy as np


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Which documents share a row of `size` tokens: each, longest first, where it leaves least room.

    The same lengths give the same rows; every document is in one of them, whole.

    Raises:
        ValueError: If a document is empty or longer than a row.
    """
    for i, length in enumerate(lengths):
        if not 0 < length <= size:
            raise ValueError(f"document {i} has {length} tokens, not 1 to {size=}")
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        best = bisect.bisect_left(room, (lengths[i], 0))
        free, row = room.pop(best) if best < len(room) else (size, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        bisect.insort(room, (free - lengths[i], row))
    return rows


def lay_out(rows: Sequence[Sequence[np.ndarray]], size: int, fill: int = 0) -> np.ndarray:
    """Arrays `[T, ...]` end to end in rows of `size`, `[B, S, ...]`, with `fill` behind.

    Raises:
        ValueError: If a row holds more than `size`.
    """
    first = rows[0][0]
    out = np.full((len(rows), size, *first.shape[1:]), fill, first.dtype)
    for n, row in enumerate(rows):
        total = sum(len(x) for x in row)
        if total > size:
            raise ValueError(f"row {n} holds {total} tokens, more than {size=}")
        out[n, :total] = np.concatenate(row)
    return out
