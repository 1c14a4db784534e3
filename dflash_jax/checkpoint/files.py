"""JSON in, and folders out that appear whole or not at all."""

import contextlib
import json
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class TensorInfo(NamedTuple):
    """A tensor without its values.

    Attributes:
        name: In the checkpoint.
        dtype: As numpy spells it ("bfloat16"), or a GGUF block format ("Q8_0").
        shape: As numpy has it.
        nbytes: In the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


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


def token_ids(ids: Any, source: object = "the config") -> tuple[int, ...]:
    """Stop ids, as a file has them.

    Raises:
        ValueError: If they are not a list of ids.
    """
    known = isinstance(ids, list) and all(type(i) is int and 0 <= i < 2**31 for i in ids)
    if not known:
        raise ValueError(f"{source}: eos_token_id={ids!r} must be token ids")
    return tuple(ids)


def understand(path: Path, build: Callable[..., T], *args: Any, **options: Any) -> T:
    """What `build` makes of a checkpoint's config.

    Raises:
        ValueError: If it makes nothing of it: one line that begins with the checkpoint's name.
    """
    try:
        return build(*args, **options)
    except ValueError as e:
        raise ValueError(f"{path}: {one_line(e, 2000)}") from e
    except (TypeError, KeyError, AttributeError, OverflowError) as e:
        raise ValueError(f"{path}: the config is malformed: {one_line(e)}") from e


def pad_id(config: Mapping[str, Any], source: object = "the config") -> int | None:
    """`pad_token_id`; below 0, as some write it, is none.

    Raises:
        ValueError: If it is no id.
    """
    pad = config.get("pad_token_id")
    if pad is not None and (type(pad) is not int or pad >= 2**31):
        raise ValueError(f"{source}: pad_token_id={pad!r} must be a token id")
    return pad if pad is not None and pad >= 0 else None


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
