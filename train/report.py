"""One HTML file on a training run: curves, held-out acceptance, recipe, data, decoded samples.

    python -m train.report RUN [-o FILE]

Reads what is in the run's folder, finished or not; older runs may lack parts. The file needs no other
file and no network.
"""

import argparse
import dataclasses
import datetime
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from dflash_jax import command
from train.chart import Line, chart
from train.config import TrainConfig

Record = dict[str, Any]
# Columns of an evaluation: a record's key, and what it is called.
MEASURES = {"acceptance_length": "teacher-forced", "decoded": "decoded", "gap": "gap"}
CURVES = {
    "loss": "Loss",
    "accuracy": "Accuracy of proposals",
    "learning_rate": "Learning rate",
    "labels_per_second": "Labels a second, since the start",
}
_FROM_ZERO = {title for key, title in CURVES.items() if key != "loss"}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run's folder tells.

    Attributes:
        folder: Its path.
        recipe: Of `recipe.json`; empty in a folder that has none.
        data: Counts of `data.json`; empty for older runs.
        records: Of `metrics.jsonl`, by step.
        samples: Of `samples.jsonl`.
    """

    folder: Path
    recipe: Mapping[str, Any]
    data: Mapping[str, int]
    records: Sequence[Record]
    samples: Sequence[Record]

    @property
    def evaluations(self) -> list[Record]:
        return [r for r in self.records if "acceptance_length" in r]

    @property
    def sets(self) -> list[str]:
        """The held-out sets, in the order of the records."""
        return list(dict.fromkeys(s for r in self.evaluations for s in r["acceptance_length"]))


def read_run(folder: Path) -> Run:
    """Reads a run's folder.

    Raises:
        ValueError: If it is no run's, or a file of it is malformed.
    """
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "recipe.json")):
        raise ValueError(f"{folder} is no run: it has neither metrics.jsonl nor recipe.json")
    records, samples = (_read_lines(folder / f"{n}.jsonl") for n in ("metrics", "samples"))
    recipe, data = (_read_object(folder / f"{n}.json") for n in ("recipe", "data"))
    return Run(folder, recipe, data, sorted(records, key=lambda r: r["step"]), samples)


def _read_lines(file: Path) -> list[Record]:
    """A file's records; the last line may be half-written."""
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as e:
            if number == len(lines):
                break
            raise ValueError(f"{file}, line {number}: {e}") from e
        if record is not None and not (isinstance(record, dict) and "step" in record):
            raise ValueError(f"{file}, line {number}: no record of a step")
        records += [record] if record else []
    return records


def _read_object(file: Path) -> Record:
    try:
        value = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except json.JSONDecodeError as e:
        raise ValueError(f"{file}: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds no JSON object")
    return value


def curve(records: Iterable[Record], *path: str) -> list[tuple[float, float]]:
    """(step, value) where a record has a finite number at a path of keys."""
    points = []
    for record in records:
        value: Any = record
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float) and math.isfinite(value):
            points.append((record["step"], value))
    return points


def charts(run: Run) -> list[str]:
    """The run's curves as SVG; those of sets have a line a set."""
    curves = {
        f"Acceptance length, {name}": [Line(s, curve(run.records, key, s)) for s in run.sets]
        for key, name in MEASURES.items()
        if key != "gap"
    } | {title: [Line("", curve(run.records, key))] for key, title in CURVES.items()}
    drawn = {title: [line for line in lines if line.points] for title, lines in curves.items()}
    steps = (run.records[0]["step"], run.records[-1]["step"]) if run.records else (0, 0)
    return [
        chart(title, lines, steps, zero=title in _FROM_ZERO)
        for title, lines in drawn.items()
        if lines
    ]


def best(run: Run) -> Record | None:
    """Set, measure, value and step of the best acceptance on the first held-out set, decoded if it ever was."""
    for key in ("decoded", "acceptance_length"):
        for name in run.sets[:1]:
            if points := curve(run.records, key, name):
                step, value = max(points, key=lambda p: (p[1], p[0]))
                return {"set": name, "measure": MEASURES[key], "value": value, "step": step}
    return None


def state(run: Run) -> str:
    """How far the run is."""
    steps = run.recipe.get("steps")
    done = run.records[-1]["step"] if run.records else 0
    if not steps:
        return f"{done:,} steps"
    return f"{done:,} steps, done" if done >= steps else f"Step {done:,} of {steps:,} ({100 * done // steps}%)"  # fmt: skip


def seconds(run: Run) -> float | None:
    """From the first record to the last, pauses included; None if they have no clock."""
    times = [r["time"] for r in run.records if "time" in r]
    return times[-1] - times[0] if len(times) > 1 else None


def recipe_rows(recipe: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """(key, value, whether it is not the default) of a recipe, keys that today's recipes lack included."""
    defaults = json.loads(json.dumps(dataclasses.asdict(TrainConfig(run=""))))
    return [
        (
            key,
            value if value and isinstance(value, str) else json.dumps(value),
            defaults.get(key) != value,
        )
        for key, value in recipe.items()
    ]


def shown_samples(samples: Sequence[Record]) -> list[tuple[int, list[Record]]]:
    """Samples by step, the latest first, each with its rounds' mean and (piece, tokens) of each round."""
    by_step: dict[int, list[Record]] = {}
    for s in samples:
        rounds = s.get("rounds", [])
        pieces = s.get("pieces", [])
        # The first piece is prefill's token, which is of no round.
        counts = [1, *rounds][: len(pieces)]
        mean = sum(rounds) / len(rounds) if rounds else None
        by_step.setdefault(s["step"], []).append(
            {**s, "mean": mean, "tinted": list(zip(pieces, counts))}
        )
    return sorted(by_step.items(), reverse=True)


def render(run: Run) -> str:
    """The report as HTML."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    env = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    took = seconds(run)
    return env.get_template("report.html.j2").render(
        run=run, name=run.folder.resolve().name, state=state(run), best=best(run), charts=charts(run),
        measures={k: v for k, v in MEASURES.items() if any(k in r for r in run.records)}, recipe=recipe_rows(run.recipe), samples=shown_samples(run.samples),
        took=None if took is None else str(datetime.timedelta(seconds=round(took))),
        now=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.report", description=__doc__.splitlines()[0], **command.examples("""
            python -m train.report runs/smollm2
            python -m train.report runs/smollm2 -o report.html
        """),
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a training run")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="default: RUN/report.html")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)

    def write() -> int:
        out = args.out or args.run / "report.html"
        text = render(read_run(args.run))
        out.write_text(text, encoding="utf-8")
        print(f"report written to {out}", file=sys.stderr)
        return 0

    return command.run(write)


if __name__ == "__main__":
    sys.exit(main())
