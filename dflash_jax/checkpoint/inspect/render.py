"""A report for people: tables on a terminal, plain lines elsewhere."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_jax.checkpoint.inspect import Report

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def render(report: Report) -> None:
    """Prints a report on stdout."""
    console = Console(highlight=False, soft_wrap=False)
    console.print(table(report)) if console.is_terminal else print(plain(report))


def table(report: Report) -> Table:
    """The report as a table of rich's."""
    rows = Table.grid(padding=(0, 2))
    for name, value in report.about.items():
        rows.add_row(Text(name, "dim"), Text(_spell(value)))
    rows.add_row()
    for f in report.findings:
        rows.add_row(Text(f.severity, _COLOURS[f.severity]), Text(f.field, "bold"))
        rows.add_row("", Text(f.effect))
        rows.add_row(Text("mend", "green"), Text(f.mend))
    rows.add_row(Text(_count(report), "bold"))
    return rows


def plain(report: Report) -> str:
    """The report as lines, a finding on three."""
    width = max(map(len, report.about))
    lines = [f"{name:{width}}  {_spell(value)}" for name, value in report.about.items()]
    for f in report.findings:
        lines += ["", f"{f.severity}: {f.field}", f"    {f.effect}", f"    mend: {f.mend}"]
    return "\n".join([*lines, "", _count(report)])


def _count(report: Report) -> str:
    counts = {s: sum(f.severity == s for f in report.findings) for s in _COLOURS}
    said = [f"{n} {s}{'s' * (n > 1)}" for s, n in counts.items() if n]
    return ", ".join(said) or "nothing found wrong"


def _spell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_spell(v)}" for k, v in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
