import io
import json
import struct
import sys
import types

import pytest
from rich.console import Console
from runs import events, recipe, records, scalars_of

from train.metrics import Log, check_wandb, open_events, read_until, say_evaluation

STEP = {"loss": 2.0, "accuracy": 0.5, "learning_rate": 1e-3, "labels_per_second": 9.0, "tokens_per_second": 99.0}  # fmt: skip


def row(step: int) -> dict:
    return {"step": step, **STEP}


def test_records_of_later_steps_and_half_a_line_are_forgotten(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "text": "a\u2028b"} for s in (1, 2, 3)]
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
    file.write_text(text + '{"step": 4, "lo', encoding="utf-8")
    assert read_until(file, 2) == rows[:2] == records(tmp_path)
    assert read_until(tmp_path / "absent.jsonl", 0) == []


def test_a_run_that_goes_on_has_no_step_twice_in_its_events(tmp_path):
    config = recipe(tmp_path)
    with Log(config, 0) as log:
        for step in (1, 2, 3):
            log.write(row(step))
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-7])  # as a kill leaves it
    path.rename(f"{path}.old")  # its name is the second's in which it was begun
    with Log(config, 2) as log:
        assert [r["step"] for r in log.records] == [1, 2]
        log.write(row(3))
    assert events(tmp_path / "tensorboard") == scalars_of(row(s) for s in (1, 2, 3))
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]


def test_events_keep_the_clock_of_their_records(tmp_path):
    open_events(tmp_path / "e", [{**row(1), "time": 123.5}]).close()
    (path,) = (tmp_path / "e").iterdir()
    assert struct.pack("<d", 123.5) in path.read_bytes()


def test_a_stdout_that_is_no_terminal_has_a_line_every_few_steps(tmp_path, capsys):
    with Log(recipe(tmp_path, log_every=2), 0) as log:
        for step in (1, 2, 3, 4):
            log.write(row(step))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "step 2/6 loss 2.000 accuracy 0.500 rate 1.00e-03 9 labels/s 99 tokens/s 0:"
    )
    assert second.startswith("step 4/6")
    assert second.endswith(" left")


def test_an_evaluation_is_a_table_on_a_terminal_and_a_line_a_set_elsewhere():
    record = {"step": 5, "acceptance_length": {"held_out": 2.5, "gsm8k": 2.0}, "decoded": {"held_out": 2.25}, "gap": {"held_out": 0.25}}  # fmt: skip
    plain, terminal = io.StringIO(), io.StringIO()
    say_evaluation(Console(file=plain), record)
    assert plain.getvalue().splitlines() == [
        "step 5 held_out teacher-forced 2.500 decoded 2.250 gap 0.250",
        "step 5 gsm8k teacher-forced 2.000",
    ]
    say_evaluation(Console(file=terminal, force_terminal=True, width=80), record)
    text = terminal.getvalue()
    assert "acceptance length, step 5" in text
    assert all(word in text for word in ("teacher-forced", "2.500", "2.250", "0.250", "gsm8k"))


def test_samples_are_kept_and_shown(tmp_path, capsys):
    sample = {"step": 3, "set": "held_out", "id": "p1", "prompt": "why", "pieces": ["[b]a", "bc"], "rounds": [2], "finish": "stop"}  # fmt: skip
    with Log(recipe(tmp_path), 0) as log:
        log.show([sample])
    assert records(tmp_path, "samples.jsonl") == [sample]
    assert capsys.readouterr().err == "step 3 held_out p1: 2.00 tokens a round [2]\n[b]a|bc\n\n"


class FakeWandb(types.ModuleType):
    """Weights & Biases as far as a run uses it."""

    def __init__(self):
        super().__init__("wandb")
        self.begun, self.logged, self.finished = [], [], 0

    def init(self, **options):
        self.begun.append(options)
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


def test_records_go_to_weights_and_biases_if_the_recipe_says_so(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = recipe(tmp_path, wandb="drafts")
    check_wandb(config)
    with Log(config, 0) as log:
        log.write(row(1) | {"acceptance_length": {"held_out": 2.0}})
        log.write(row(2))
    with Log(config, 2):  # the run goes on
        pass
    first, second = fake.begun
    assert (first["project"], first["name"], first["resume"]) == ("drafts", tmp_path.name, "allow")
    assert first["config"]["learning_rate"] == config.learning_rate
    assert first["id"] == second["id"]
    assert fake.finished == 2
    assert fake.logged == [
        (1, STEP | {"acceptance_length/held_out": 2.0}),
        (2, STEP),
    ]


def test_weights_and_biases_are_not_imported_unasked_and_missed_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import fails
    check_wandb(recipe(tmp_path))
    with Log(recipe(tmp_path), 0) as log:
        log.write(row(1))
    with pytest.raises(ValueError, match="wandb='drafts' needs the package wandb: pip install"):
        check_wandb(recipe(tmp_path, wandb="drafts"))
