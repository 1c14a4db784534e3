"""JSON in, and folders out that appear whole or not at all."""

import contextlib
import json
import os
import shutil
import signal
import uuid
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
        ValueError: If the file is missing, unreadable, or holds something else; it is named.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{path} is not a readable JSON file: {one_line(e)}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def one_line(error: BaseException, limit: int = 300) -> str:
    """An error's text without line breaks, cut to `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


@contextlib.contextmanager
def atomic_folder(destination: str | Path) -> Generator[Path]:
    """Gives a new folder beside `destination` and renames it to that name on success.

    Missing parents are made. After a failure nothing is left behind, parents included.

    Raises:
        ValueError: If the destination exists, or its parent cannot be written to.
    """
    destination = Path(os.path.abspath(destination))
    _refuse_existing(destination)
    parent = destination.parent
    made = [p for p in (parent, *parent.parents) if not p.exists()]
    folder = parent / f".{destination.name}.{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True)
    except OSError as e:
        raise ValueError(f"cannot write to {parent}: {one_line(e)}") from e
    try:
        yield folder
        _refuse_existing(destination)
        folder.rename(destination)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for p in made:
            with contextlib.suppress(OSError):  # someone else may use it by now
                p.rmdir()
        raise


@contextlib.contextmanager
def tidy_termination() -> Generator[None]:
    """Makes SIGTERM leave the block as an exception would, so that an `atomic_folder` is removed.

    Raises:
        SystemExit: On SIGTERM, with the status a shell gives it.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _refuse_existing(destination: Path) -> None:
    if os.path.lexists(destination):
        raise ValueError(f"{destination} exists already; nothing was written")
