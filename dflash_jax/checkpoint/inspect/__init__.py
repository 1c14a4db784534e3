"""Says what a checkpoint is, and everything wrong with it."""

import dataclasses
from pathlib import Path
from typing import Any

from dflash_jax.checkpoint import hf
from dflash_jax.checkpoint.inspect.about import about
from dflash_jax.checkpoint.inspect.common import COMMON, TARGET, refused
from dflash_jax.checkpoint.inspect.drafts import DRAFT
from dflash_jax.checkpoint.inspect.facts import Facts, gather
from dflash_jax.checkpoint.inspect.finding import SEVERITIES, Finding

__all__ = ["Finding", "Report", "inspect"]


@dataclasses.dataclass(frozen=True)
class Report:
    """What `inspect` found.

    Attributes:
        about: What the checkpoint is, by name of what is told; plain values that JSON can hold.
        findings: The worst first.
    """

    about: dict[str, Any]
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """Whether no finding is an error."""
        return all(f.severity != "error" for f in self.findings)


def inspect(ref: str | Path, target: str | Path | None = None) -> Report:
    """Examines a target or a draft: its config, its tensors' names and shapes, and every weight once.

    Whatever the readers refuse is an error among the findings.

    Args:
        ref: A hub id, a Hugging Face folder, an Orbax folder of ours, or a GGUF file (targets).
        target: Of a draft, which is then judged as this target's; only its config and tokenizer are read.

    Raises:
        ValueError: If there is no checkpoint at all, or `target` is given for a target or is a draft.
    """
    path = hf.resolve(ref)
    other = None if target is None else gather(hf.resolve(target), values=False)
    if other is not None and other.kind == "draft":
        raise ValueError(f"{other.path} is a draft, not a target")
    facts = gather(path, other, all_files=Path(ref).expanduser().exists())
    if other is not None and facts.kind == "target":
        raise ValueError(f"{path} is a target: --target is for drafts")
    return Report(about(facts), tuple(find(facts)))


def find(facts: Facts) -> list[Finding]:
    """All findings, the worst first."""
    found: list[Finding] = []
    for check in COMMON + (TARGET if facts.kind == "target" else DRAFT):
        try:
            found += check(facts)
        except (TypeError, ValueError, KeyError, AttributeError):
            # A config that the reader refuses may hold anything: its refusal is a finding already.
            if facts.config is not None:
                raise
    found += refused(facts, found)
    # Names out of a broken file may hold line breaks.
    lines = [Finding(f.severity, *(" ".join(t.split()) for t in (f.field, f.effect, f.mend))) for f in found]  # fmt: skip
    return sorted(dict.fromkeys(lines), key=lambda f: SEVERITIES.index(f.severity))
