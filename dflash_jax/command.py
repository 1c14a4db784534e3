"""What all commands share: how they end, what they show while they work, and the cache of compiled programs.

Nothing slow is imported with this module: `--help` and a mistyped option should answer at once.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


def run(command: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Calls a command; returns its exit status.

    Args:
        command: Returns its own status.
        interrupted: Said on stderr after Ctrl-C.

    Returns:
        1, with one line on stderr, for a user's mistake; 130 after Ctrl-C; 141 if nobody reads stdout.
    """
    # transformers would say on every start that torch is missing; here it only reads tokenizers.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        return command()
    except BrokenPipeError:
        # Python would complain once more when it flushes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, FloatingPointError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130


def examples(lines: str) -> dict[str, Any]:
    """Of a parser: what makes its help end with examples, a command a line."""
    shown = "".join(f"\n  {line.strip()}" for line in lines.strip().splitlines())
    return {
        "epilog": f"examples:{shown}",
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, where jax is not told another place."""
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "dflash-jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def colours(stream: Any) -> bool:
    """Whether a stream is a terminal that is to show colours: see no-color.org."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and stream.isatty()


@contextlib.contextmanager
def working(what: str) -> Generator[None]:
    """Says on a terminal's stderr what is being done, and for how long, while it is."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    columns = SpinnerColumn(), "{task.description}", TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as shown:
        shown.add_task(what, total=None)
        yield


def bar(*details: "str | ProgressColumn") -> "Progress":
    """A bar of things done on a terminal's stderr, with the time left; elsewhere it shows nothing.

    Args:
        details: Further columns, in rich's form.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    # Lines on a stdout that goes elsewhere must not be taken to where the bar is.
    return Progress(
        "{task.description}", MofNCompleteColumn(), BarColumn(), *details, TimeRemainingColumn(),
        console=console, disable=not console.is_terminal, redirect_stdout=False,
    )  # fmt: skip
