"""What a run says of itself: JSON lines, TensorBoard's events, Weights & Biases, and lines or a table on stdout.

`metrics.jsonl` is the truth. A run that goes on drops the records of the steps that it repeats, and
writes TensorBoard's events anew from those that are left, so no step is there twice and what a kill
left half-written is gone.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import shutil
import time
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from train.config import TrainConfig
from train.mesh import is_first, wait_for_all

Record = dict[str, Any]


def read_until(file: Path, step: int) -> list[Record]:
    """The file's records up to `step`, and drops the others, whose steps an interrupted run repeats."""
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    records = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed
            records.append(json.loads(line))
    records = [r for r in records if r["step"] <= step]
    wait_for_all(f"{file.name} is read")
    if is_first():
        partial = file.with_suffix(".partial")
        partial.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        partial.replace(file)
    return records


def append(file: Path, records: Iterable[Record]) -> None:
    with file.open("a", encoding="utf-8") as f:
        f.write("".join(json.dumps(r) + "\n" for r in records))


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """A record's numbers by name; those of tables as table/name."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif name not in ("step", "time"):
            yield prefix + name, value


class Rates:
    """Labels and tokens a second, over the time that steps took."""

    def __init__(self):
        self._total: dict[str, float] = {}
        self._seconds = 0.0

    @contextlib.contextmanager
    def step(self) -> Generator[dict[str, float]]:
        """Times a step, whose counts are put into the value."""
        counts: dict[str, float] = {}
        since = time.perf_counter()
        yield counts
        self._seconds += time.perf_counter() - since
        for name, count in counts.items():
            self._total[name] = self._total.get(name, 0.0) + count

    @property
    def a_second(self) -> dict[str, float]:
        return {f"{name}_per_second": total / self._seconds for name, total in self._total.items()}


class Log:
    """Where a run's records go, as a context. Only the first process writes and shows anything.

    Attributes:
        records: Those of the steps before this call.
    """

    def __init__(self, config: TrainConfig, first: int):
        self._config, self._run = config, Path(config.run)
        self._file, self._samples = (self._run / f"{n}.jsonl" for n in ("metrics", "samples"))
        self.records = read_until(self._file, first)
        read_until(self._samples, first)
        self._events = open_events(self._run / "tensorboard", self.records) if is_first() else None
        self._wandb = open_wandb(config) if is_first() and config.wandb else None
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        err = Console(stderr=True)
        # Lines on a stdout that goes elsewhere must not be taken to where the bar is.
        shown = err.is_terminal and is_first()
        self._progress = Progress(*columns, console=err, disable=not shown, redirect_stdout=False)
        self._task = self._progress.add_task("", total=config.steps, completed=first, note="")
        self._since, self._first = time.perf_counter(), first

    def __enter__(self) -> "Log":
        self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        self._progress.stop()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()

    def write(self, record: Record) -> None:
        """Takes the record of the step that is done."""
        if self._events is None:
            return
        record = {**record, "time": time.time()}
        append(self._file, [record])
        add_events(self._events, record)
        if self._wandb is not None:
            self._wandb.log(dict(scalars(record)), step=record["step"])
        step, out = record["step"], Console()
        elsewhere = not out.is_terminal
        self._progress.update(
            self._task, advance=1, note=f"loss {record['loss']:.2f} {_rates(record)}"
        )
        if "acceptance_length" in record:
            self._events.flush()
            # Beside the bar only the bar's own console can write.
            say_evaluation(
                out if elsewhere or self._progress.disable else self._progress.console, record
            )
        if elsewhere and step % self._config.log_every == 0:
            done = (time.perf_counter() - self._since) / (step - self._first)
            left = datetime.timedelta(seconds=round(done * (self._config.steps - step)))
            print(f"step {step}/{self._config.steps} {one_line(record)} {left} left", flush=True)

    def show(self, samples: Sequence[Record]) -> None:
        """Keeps decoded prompts, and shows them on stderr."""
        if self._events is None:
            return
        append(self._samples, samples)
        for sample in samples:
            self._progress.console.print(
                sample_text(sample), markup=False, highlight=False, soft_wrap=True
            )


def open_events(folder: Path, records: Iterable[Record]) -> Any:
    """A TensorBoard writer into the emptied folder, which has the records already."""
    from tensorboardX import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)
    writer = SummaryWriter(str(folder))
    for record in records:
        add_events(writer, record)
    writer.flush()
    return writer


def add_events(writer: Any, record: Record) -> None:
    for name, value in scalars(record):
        writer.add_scalar(name, value, record["step"], record.get("time"))


def check_wandb(config: TrainConfig) -> None:
    """Raises ValueError if a recipe asks for Weights & Biases, and they are not installed."""
    if config.wandb:
        try:
            import wandb  # noqa: F401
        except ImportError as e:
            raise ValueError(
                f"wandb={config.wandb!r} needs the package wandb: pip install wandb"
            ) from e


def open_wandb(config: TrainConfig) -> Any:
    """A run of Weights & Biases, the same one for all calls that go on with a run's folder.

    It refuses steps that it has, so what an interrupted run repeats stays there once.
    """
    import wandb

    kept = Path(config.run) / "wandb-id"
    if not kept.exists():
        kept.write_text(uuid.uuid4().hex[:12])
    return wandb.init(
        project=config.wandb, dir=config.run, name=Path(config.run).name, id=kept.read_text(), resume="allow",
        config=dataclasses.asdict(config),
    )  # fmt: skip


def sample_text(sample: Record) -> str:
    """A sample to read: its text, cut where the rounds end."""
    mean = sum(sample["rounds"]) / max(len(sample["rounds"]), 1)
    head = f"step {sample['step']} {sample['set']} {sample['id']}: {mean:.2f} tokens a round {sample['rounds']}"
    return f"{head}\n{'|'.join(sample['pieces'])}\n"


def one_line(record: Record) -> str:
    """A step's values in words."""
    return (
        f"loss {record['loss']:.3f} accuracy {record['accuracy']:.3f} "
        f"rate {record['learning_rate']:.2e} {_rates(record)}"
    )


def _rates(record: Record) -> str:
    return f"{record['labels_per_second']:.0f} labels/s {record['tokens_per_second']:.0f} tokens/s"


def say_evaluation(console: Console, record: Record) -> None:
    """The acceptance lengths of an evaluated step: a table on a terminal, else a line a set."""
    columns = {"acceptance_length": "teacher-forced", "decoded": "decoded", "gap": "gap"}
    rows = {
        name: {title: record.get(key, {}).get(name, math.nan) for key, title in columns.items()}
        for name in record["acceptance_length"]
    }
    if not console.is_terminal:
        for name, row in rows.items():
            values = " ".join(f"{title} {v:.3f}" for title, v in row.items() if not math.isnan(v))
            print(f"step {record['step']} {name} {values}", file=console.file, flush=True)
        return
    table = Table("set", *columns.values(), title=f"acceptance length, step {record['step']}")
    for name, row in rows.items():
        table.add_row(name, *("" if math.isnan(v) else f"{v:.3f}" for v in row.values()))
    console.print(table)
