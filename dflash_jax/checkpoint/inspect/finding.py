"""One thing that is wrong with a checkpoint, and the type of the functions that look for it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Literal

from dflash_jax.checkpoint.inspect.facts import Facts

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something wrong with a checkpoint.

    Attributes:
        severity: "error": it cannot be decoded, or nothing is accepted. "warning": probably wrong, or
            less is accepted. "note": other systems read it differently.
        field: The config's key, or the tensor.
        effect: What it does to loading or to acceptance.
        mend: What to write.
    """

    severity: Severity
    field: str
    effect: str
    mend: str


error, warning, note = (functools.partial(Finding, severity) for severity in SEVERITIES)
Check = Callable[[Facts], Iterator[Finding]]
