import html
import json
import re
from html.parser import HTMLParser

import pytest

from train import report
from train.chart import Line, binned, chart, ticks

SETS = ("held_out", "gsm8k")


def row(step: int, evaluated: bool = False) -> dict:
    record = {"step": step, "loss": 4.0 / step, "accuracy": 0.25, "learning_rate": 1e-3, "labels_per_second": 90.0, "time": 1e9 + step}  # fmt: skip
    if evaluated:
        record |= {"acceptance_length": {s: 1.5 + step / 100 for s in SETS}, "decoded": {"held_out": 1.25}, "gap": {"held_out": 0.25}}  # fmt: skip
    return record


SAMPLE = {"step": 4, "set": "held_out", "id": "p<1>", "prompt": "<|im_start|>why & how", "pieces": ["So", " <b>it", " is", ""], "rounds": [2, 1, 1], "finish": "stop"}  # fmt: skip


def write_run(folder, records=(), samples=(), recipe=None, data=None):
    folder.mkdir(exist_ok=True)
    for name, rows in (("metrics", records), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for name, value in (("recipe", recipe), ("data", data)):
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.fixture
def run(tmp_path):
    records = [row(s, evaluated=s in (2, 4)) for s in range(1, 6)]
    recipe = {
        "run": "r",
        "steps": 10,
        "learning_rate": 0.5,
        "seed": 0,
        "target": "",
        "forgotten_key": 3,
    }
    return write_run(tmp_path / "my-run", records, [SAMPLE], recipe, {"kept": 12345})


class Page(HTMLParser):
    """What a reader sees; fails on tags that do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.words, self.outside = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.outside += [v for k, v in attrs if k in ("src", "href") or "url(" in (v or "")]
        if tag not in ("meta", "path") or (
            tag == "path" and "mark" in (dict(attrs).get("class") or "")
        ):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)


def test_a_report_is_one_file_that_says_it_all(run, tmp_path):
    out = tmp_path / "report.html"
    assert report.main([str(run), "-o", str(out)]) == 0
    page = Page(out.read_text())
    text = " ".join(" ".join(page.words).split())
    assert page.outside == []
    assert "Step 5 of 10 (50%)" in text
    assert "Best on held_out: 1.250 tokens a round, decoded, at step 4" in text
    titles = ("teacher-forced", "decoded", "Loss", "Accuracy", "Learning rate", "Labels a second")
    assert all(title in text for title in titles)
    assert "12,345" in text
    assert "learning_rate = 0.5" in text
    assert 'target = ""' in text
    assert "forgotten_key = 3" in text
    assert "<|im_start|>why & how" in text


def test_the_pieces_of_rounds_are_told_apart(run):
    text = report.render(report.read_run(run))
    spans = re.findall(r'<span( class="odd")? title="([^"]*)">([^<]*)</span>', text)
    assert [(bool(odd), title, html.unescape(piece)) for odd, title, piece in spans] == [
        (False, "prefill", "So"),
        (True, "round 1: 2 tokens", " <b>it"),
        (False, "round 2: 1 tokens", " is"),
        (True, "round 3: 1 tokens", ""),
    ]


def test_only_what_is_no_default_is_bold(run):
    rows = report.recipe_rows(report.read_run(run).recipe)
    assert {key for key, _, changed in rows if changed} == {
        "run", "steps", "learning_rate", "forgotten_key"
    }  # fmt: skip


def test_an_old_or_unfinished_run_has_a_report_too(tmp_path):
    folder = write_run(tmp_path / "old", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan")}])  # fmt: skip
    (folder / "samples.jsonl").unlink()
    with (folder / "metrics.jsonl").open("a") as f:
        f.write('{"step": 3, "lo')
    text = report.render(report.read_run(folder))
    Page(text)
    assert "2 steps" in text
    assert "decoded none yet" in text
    assert "no recipe.json" in text
    just_begun = write_run(tmp_path / "new", recipe={"steps": 10})
    assert "No step is recorded yet" in report.render(report.read_run(just_begun))


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path} is no run: it has neither metrics.jsonl nor recipe.json\n"  # fmt: skip
    broken = write_run(tmp_path / "broken", [row(1)])
    (broken / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        report.read_run(broken)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1.47, 2.79), (0, 0), (5, 5), (1, 6000), (0, 1.2e-3), (-2, 3)])  # fmt: skip
def test_ticks_are_round_and_hold_the_values(low, high):
    found = ticks(low, high)
    assert found[0] <= low <= high <= found[-1]
    assert 2 <= len(found) <= 7
    step = found[1] - found[0]
    assert f"{step:.1e}"[:3] in ("1.0", "2.0", "2.5", "5.0")


def test_bins_keep_the_ends_and_the_extremes():
    points = [(i, float(i % 7)) for i in range(1, 1001)]
    bins = binned(points, 10)
    assert [x for x, *_ in bins] == list(range(100, 1001, 100))
    assert all(low == 0 and high == 6 and 2 < mean < 4 for _, mean, low, high in bins)
    assert [(x, mean) for x, mean, _, _ in binned(points[:3], 10)] == points[:3]


def test_a_line_lies_inside_its_chart_and_names_are_escaped():
    svg = chart("a<b", [Line("x&y", [(1, 1.0), (9, 3.0)])], (1, 9))
    assert "a&lt;b" in svg
    assert "x&amp;y" in svg
    (path,) = re.findall(r'class="line s0"[^>]*d="M([\d. L]+)"', svg)
    assert path == "56.0 216.0L434.0 50.0"
