"""Executes the notebooks: of each NAME.py here the NAME.ipynb beside it, with its outputs.

    python notebooks/execute.py [NAME ...] [--check] [--jobs N]

Fails at the first cell that raises, and for a notebook that writes to stderr. With `--check` nothing
is written. The notebooks share compiled programs, in a folder that lasts as long as this command.
"""

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
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


def execute(source: Path) -> nbformat.NotebookNode:
    """The notebook of a py:percent file, with its outputs.

    Raises:
        CellExecutionError: If a cell raises.
        ValueError: If a cell writes to stderr, as warnings do.
    """
    notebook = jupytext.read(source, fmt="py:percent")
    NotebookClient(
        notebook, kernel_name="python3", timeout=900, startup_timeout=600, record_timing=False,
        # Which would warn, for each, that it can be listened to on its own machine.
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(source.parent)}},
    ).execute()  # fmt: skip
    kernel = notebook.metadata["kernelspec"]
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise ValueError(f"{source.name}, cell {number} wrote to stderr: {output.text}")
    return notebook


def run(name: str, check: bool) -> str:
    """Executes a notebook, and says what it cost.

    Raises:
        ValueError: What is wrong with it.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        notebook = execute(HERE / f"{name}.py")
    except (CellExecutionError, ValueError) as e:
        raise ValueError(f"{name}: {e}") from None
    if not check:
        nbformat.write(notebook, HERE / f"{name}.ipynb")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return f"{name}: {after.ru_utime - before.ru_utime:.0f} s of CPU"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument(
        "--jobs", type=int, default=1, help="notebooks at a time; 1, the default, for their timings"
    )
    args = parser.parse_args(argv)
    names = args.names or sorted(path.stem for path in HERE.glob("[0-9]*.py"))
    with tempfile.TemporaryDirectory() as programs:
        os.environ.update(ENVIRONMENT)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", programs)
        # Processes that are started anew, one a notebook: each counts what its own kernel cost.
        with ProcessPoolExecutor(
            args.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1
        ) as pool:
            started = [pool.submit(run, name, args.check) for name in names]
            try:
                for done in started:
                    print(done.result(), flush=True)
            except ValueError as e:
                pool.shutdown(cancel_futures=True)
                print(f"error: {e}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
