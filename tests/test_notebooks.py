"""The committed notebooks are what their sources say, and fit to be shown."""

import base64
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
MOST_BYTES = 60_000
OF_A_MACHINE = re.compile(r"/(tmp|home|root|work|usr|opt|Users)/|\b20\d\d-\d\d-\d\dT?\d|Warning:")


def cells_of_source(path):
    """(kind, text) of each cell of a py:percent file."""
    for part in path.read_text().split("# %%")[1:]:
        title, _, text = part.partition("\n")
        if title.strip() == "[markdown]":
            lines = text.strip().split("\n")
            yield "markdown", "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
        else:
            yield "code", text.strip()


def read(path):
    return json.loads(path.with_suffix(".ipynb").read_text())["cells"]


def images(cells):
    outputs = (output for cell in cells for output in cell.get("outputs", ()))
    return [base64.b64decode(o["data"]["image/png"]) for o in outputs if "image/png" in o.get("data", {})]  # fmt: skip


def test_every_notebook_has_its_source():
    assert {p.stem for p in FOLDER.glob("*.ipynb")} == {p.stem for p in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_a_source_names_its_kernel(path):
    # Without it `jupytext --execute` finds none in a new environment.
    header = path.read_text().split("# %%")[0]
    written = json.loads(path.with_suffix(".ipynb").read_text())["metadata"]["kernelspec"]
    assert header.count("kernelspec:") == 1
    assert all(f"#     {key}: {value}\n" in header for key, value in written.items())


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_notebook_is_its_source_executed(path):
    cells = read(path)
    assert [(c["cell_type"], "".join(c["source"])) for c in cells] == list(cells_of_source(path))
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_notebook_can_be_shown(path):
    cells = read(path)
    sizes = [len(image) for image in images(cells)]
    assert sizes
    assert max(sizes) <= MOST_BYTES
    for cell in cells:
        for output in cell.get("outputs", ()):
            assert output.get("name") != "stderr"
            assert output["output_type"] != "error"
            said = output.get("text", []) + output.get("data", {}).get("text/plain", [])
            assert not OF_A_MACHINE.search("".join(said)), said
