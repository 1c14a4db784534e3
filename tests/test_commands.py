"""What the commands share: their examples, their end, what they show."""

import importlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax import command
from dflash_jax.cli import main, options
from dflash_jax.sampling import VERIFY
from train.config import read_recipe

ROOT = Path(__file__).parent.parent
MODULES = (
    "train.run", "train.regenerate", "train.features", "train.restore", "train.report", "convert.hf_to_orbax",
    "convert.orbax_to_hf",
)  # fmt: skip


def parser_of(module: str):
    return importlib.import_module(module).make_parser()


def examples(text: str) -> list[str]:
    """The command lines behind the word examples, without pipes and redirections."""
    lines = re.findall(r"^  (\S.*)$", text.partition("examples:\n")[2], re.M)
    return [part for line in lines for part in re.split(r" [|>] ", line) if "dflash-jax " in part or "python -m" in part]  # fmt: skip


@pytest.mark.parametrize("name", [*options.EXAMPLES, *MODULES])
def test_the_examples_in_a_help_are_understood(name, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    if name in MODULES:
        text = parser_of(name).format_help()
    else:
        with pytest.raises(SystemExit):
            main([*name.split(), "--help"])
        text = capsys.readouterr().out
    found = examples(text)
    assert len(found) >= 2
    for line in found:
        argv = shlex.split(line)
        if argv[0] == "dflash-jax":
            parser, rest = options.make_parser(), argv[1:]
        else:
            parser, rest = parser_of(argv[2]), argv[3:]
        if "--help" in rest:
            with pytest.raises(SystemExit, match="0"):
                parser.parse_args(rest)
            continue
        args = parser.parse_args(rest)
        if argv[2:3] == ["train.run"]:
            read_recipe(args.recipe, args.overrides)


def test_the_help_needs_neither_jax_nor_rich():
    code = """
import sys
from dflash_jax.cli import main
try:
    main(["generate", "--help"])
except SystemExit:
    print(*{m.split(".")[0] for m in sys.modules})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)  # fmt: skip
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "dflash_jax" in loaded
    assert not loaded & {"jax", "numpy", "rich", "transformers"}


def test_what_the_options_say_twice_is_the_same():
    assert options.VERIFY == VERIFY


@pytest.fixture
def interrupts():
    """Puts Ctrl-C's handler back: a command that ends by it leaves another."""
    before = signal.getsignal(signal.SIGINT)
    yield before
    signal.signal(signal.SIGINT, before)


def raising(error: BaseException):
    def fail() -> int:
        raise error

    return fail


@pytest.mark.parametrize(
    ("call", "status", "said"),
    [
        (lambda: 3, 3, ""),
        (raising(ValueError("no such thing")), 1, "error: no such thing\n"),
        (raising(FileNotFoundError(2, "gone", "f")), 1, "error: [Errno 2] gone: 'f'\n"),
        (raising(FloatingPointError("NaN")), 1, "error: NaN\n"),
        (raising(KeyboardInterrupt()), 130, "stopped\n"),
    ],
)
def test_a_command_ends_with_a_status_and_a_line(call, status, said, capsys, interrupts):
    assert command.run(call, "stopped") == status
    assert capsys.readouterr().err == said
    # A second Ctrl-C in Python's end is no traceback.
    expected = signal.SIG_DFL if status == 130 else interrupts
    assert signal.getsignal(signal.SIGINT) is expected


def test_ctrl_c_while_libraries_are_imported_ends_at_once():
    code = """
import signal
from dflash_jax import command
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
with command.importing():
    pass
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
with command.importing("stopped"):
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:  # as some libraries have it
        pass
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_no_command_says_that_torch_is_missing(monkeypatch):
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    assert command.run(lambda: int(os.environ[name])) == 1


def test_a_reader_that_leaves_is_no_error():
    code = "import sys; from dflash_jax import command; sys.exit(command.run(lambda: print('x' * 10**6)))"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert child.stdout is not None
    child.stdout.read(1)
    child.stdout.close()
    _, err = child.communicate()
    assert (child.returncode, err) == (141, b"")


def test_a_terminal_is_told_what_is_done_and_for_how_long(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for tty in (True, False):
        stream = io.StringIO()
        stream.isatty = lambda tty=tty: tty
        monkeypatch.setattr(sys, "stderr", stream)
        with command.working("loading " + "x" * 200) as progress:
            assert (progress is not None) is tty
            if progress:
                progress(2 * 10**9, 8 * 10**9)
        assert ("loading" in stream.getvalue(), "0:00:0" in stream.getvalue()) == (tty, tty)
        assert ("2.0 GB of 8.0 GB" in stream.getvalue()) is tty  # a long name hides nothing


@pytest.mark.parametrize(
    ("tty", "environment", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(tty, environment, expected, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty, raising=False)
    assert command.colours(sys.stdout) is expected


@pytest.mark.parametrize("shell", options.SHELLS)
def test_completion_knows_the_commands_and_their_options(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("generate", "chat", "block-size", "coupled"))
    if shell == "bash":
        assert "__target_COMPGEN=_shtab_compgen_files" in script
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_completion_without_shtab_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install shtab" in capsys.readouterr().err
