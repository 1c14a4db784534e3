"""Executes the notebooks: of each NAME.py here the NAME.ipynb beside it, with its outputs.

    python notebooks/execute.py [NAME ...] [--check]

Fails at the first cell that raises, and for a notebook that writes to stderr. With `--check` nothing
is written. The notebooks share compiled programs, in a folder that lasts as long as this command.
"""

import argparse
import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).parent
ENVIRONMENT = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",  # XLA's remarks on programs that it finds compiled
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # which says that torch is missing
    "HF_HUB_OFFLINE": "1",
}
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(source: Path) -> nbformat.NotebookNode:
    """The notebook of a py:percent file, with its outputs.

    Raises:
        CellExecutionError: If a cell raises.
        ValueError: If a cell writes to stderr, as warnings do.
    """
    notebook = jupytext.read(source, fmt="py:percent")
    NotebookClient(
        notebook, kernel_name="python3", timeout=900, startup_timeout=600, record_timing=False,
        resources={"metadata": {"path": str(source.parent)}},
    ).execute()  # fmt: skip
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise ValueError(f"{source.name}, cell {number} wrote to stderr: {output.text}")
    return notebook


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    names = args.names or sorted(path.stem for path in HERE.glob("[0-9]*.py"))
    with tempfile.TemporaryDirectory() as programs:
        os.environ.update(ENVIRONMENT)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", programs)
        for name in names:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            try:
                notebook = execute(HERE / f"{name}.py")
            except (CellExecutionError, ValueError) as e:
                print(f"error: {name}: {e}", file=sys.stderr)
                return 1
            if not args.check:
                nbformat.write(notebook, HERE / f"{name}.ipynb")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            print(f"{name}: {after.ru_utime - before.ru_utime:.0f} s of CPU", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
