"""What all commands share: how they end, what they show while they work, and the cache of compiled programs.

Nothing slow is imported with this module: `--help` and a mistyped option should answer at once.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
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
        1, with one line on stderr, for a user's mistake; 130 after Ctrl-C, and a second one then ends
        the process at once; 141 if nobody reads stdout.
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
        # In Python's own end it would be a traceback of that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print(interrupted, file=sys.stderr)
        return 130


@contextlib.contextmanager
def importing(interrupted: str = "interrupted") -> Generator[None]:
    """Lets Ctrl-C end the process at once while libraries are imported, with what `run` says and its status.

    As an exception it may come up in a library's C++ beginnings, which crash at it or pass over it.
    """

    def leave(number: int, frame: object) -> None:
        os.write(2, f"{interrupted}\n".encode())
        os._exit(130)

    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not raises or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
def working(what: str) -> Generator[Callable[[int, int], None] | None]:
    """Says on a terminal's stderr what is being done, and for how long, while it is.

    Gives a function that is told the bytes so far, and of how many, which are then shown with their speed and the
    time left; elsewhere than on a terminal None, so that nobody counts them.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.filesize import decimal
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    # A long path is what a narrow terminal cuts.
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        SpinnerColumn(), TimeElapsedColumn(), "{task.fields[bytes]}",
        TextColumn("{task.description}", table_column=rest),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, expand=True, transient=True, redirect_stdout=False
    ) as shown:
        shown.add_task(what, total=None, bytes="")
        (task,) = shown.tasks

        def told(done: int, total: int) -> None:
            shown.update(task.id, completed=done, total=total)
            text = f"{decimal(done)} of {decimal(total)}"
            if task.speed and task.time_remaining is not None:
                text += f", {decimal(int(task.speed))}/s, {task.time_remaining:.0f} s left"
            shown.update(task.id, bytes=text)

        yield told


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
