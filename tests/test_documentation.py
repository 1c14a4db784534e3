"""What README.md, CONTRIBUTING.md and docs/ show, tried: Python runs, commands parse, recipes are read, files exist.

Tiny models stand for the checkpoints that a page names. A block whose language is followed by `no-run`
(` ```python no-run `) needs what is not here: it must compile all the same.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import io
import re
import shlex
import sys
import tomllib
from pathlib import Path

import fakes
import jax.numpy as jnp
import pytest
from markdown_it import MarkdownIt

import dflash_jax as dj
from dflash_jax.decode import LENGTH
from dflash_jax.pair import embedded_target, load_tokenizer
from train.chat import question, read_rows
from train.config import TrainConfig, read_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPE = ROOT / "train/recipes/smollm2.toml"
SHELL = ("sh", "bash", "shell")
VOCABULARY = 49152  # the embedded target's, whose tokenizer the tiny one uses


@dataclasses.dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    runs: bool
    text: str

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}, line {self.line}"


def parse(page):
    return MarkdownIt().parse(page.read_text(encoding="utf-8"))


def blocks_of(page):
    for token in parse(page):
        if token.type == "fence":
            language, _, mark = token.info.strip().partition(" ")
            assert mark in ("", "no-run"), f"{page}, line {token.map[0] + 1}: {mark!r} is no mark"
            yield Block(page, token.map[0] + 1, language, mark == "", token.content)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def in_language(*languages):
    found = [b for b in BLOCKS if b.language in languages]
    return pytest.mark.parametrize("block", found, ids=str)


def inline(kind):
    """(page, content) of every inline token of a kind."""
    for page in PAGES:
        for token in parse(page):
            for child in token.children or ():
                if child.type == kind:
                    yield page, child


def test_every_block_is_of_a_language_that_is_tried():
    known = {"", "text", "json", "bibtex", "jsonl", "python", "toml", *SHELL}
    assert {str(b): b.language for b in BLOCKS if b.language not in known} == {}
    assert {"python", "toml", "jsonl", "sh"} <= {b.language for b in BLOCKS}


@pytest.fixture(scope="module")
def tiny():
    """A target and a draft of the embedded pair's vocabulary, with its tokenizer."""
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192}
    shape = dataclasses.replace(
        fakes.DRAFT, block_size=8, mask_token_id=16, target_layer_ids=(0, 1), **sizes
    )
    target = fakes.random_target(dataclasses.replace(fakes.TARGET, **sizes))
    target = dataclasses.replace(target, stop_token_ids=(2,), source=embedded_target())
    return target, fakes.random_draft(shape)


def prefill(target, draft, params, state, *, chunk):
    return state.replace(length=state.length + 1)


def decode(models, params, state, max_rounds, least_running):
    """One round that commits all tokens that are asked for; `+ 0`, since no two arrays may be one buffer."""
    return state.replace(
        length=state.limit + 0, finish=jnp.full_like(state.finish, LENGTH), rounds=state.rounds + 1,
        committed=state.committed.at[:, 0].set(state.limit - state.length),
    )  # fmt: skip


@pytest.fixture
def stand_ins(tiny, monkeypatch, tmp_path):
    """The tiny pair in the place of every checkpoint, whose arguments must be the real functions'.

    And the decoder's two programs are stand-ins, for each call would compile its own: all around them is real.
    """
    for name, model in zip(("load_target", "load_draft"), tiny):
        real = inspect.signature(getattr(dj, name))

        def load(*args, _real=real, _model=model, **options):
            _real.bind(*args, **options)
            return _model

        monkeypatch.setattr(dj, name, load)
        monkeypatch.setattr(f"dflash_jax.pair.{name}", load)
    monkeypatch.setattr("dflash_jax.jobs.prefill", prefill)
    monkeypatch.setattr("dflash_jax.jobs.decode", decode)
    monkeypatch.chdir(tmp_path)


WITH_PYTHON = sorted({b.page for b in BLOCKS if b.language == "python"})


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_python_blocks_run(page, stand_ins):
    names = {"__name__": "documentation"}
    for block in (b for b in BLOCKS if b.page == page and b.language == "python"):
        code = compile("\n" * block.line + block.text, str(page), "exec")
        if block.runs:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, names)


def commands(block):
    """The commands of a shell block; of an unmarked one, which may show output, those that it can tell."""
    for line in block.text.replace("\\\n", " ").splitlines():
        line = re.sub(r"^([A-Z_]+=\S* )*", "", line)  # what is set for this command
        for part in re.sub(r" > \S+$", "", line).split(" | "):
            if part and (block.language or part.split()[0] in COMMANDS):
                yield shlex.split(re.sub(r"\[(-[^\]]*)\]", r"\1", part), comments=True)


class Parsed(Exception):
    """Carries what a parser made of a command, instead of running it."""


def check_module(module, *arguments):
    """The options of a command are those that its own parser takes."""
    real = argparse.ArgumentParser.parse_args

    def parse_args(self, *given, **options):
        raise Parsed(real(self, *given, **options))

    patch = pytest.MonkeyPatch()
    patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    patch.setattr(sys, "argv", [module, *arguments])
    try:
        importlib.import_module(module).main()
    except Parsed as e:
        if module == "train.run":
            check_overrides(e.args[0])
    except SystemExit as e:
        if e.code:  # 0 is --help's
            pytest.fail(f"{module} does not take {arguments}")
    finally:
        patch.undo()


def check_overrides(args):
    recipe = ROOT / args.recipe
    read_recipe(recipe if recipe.exists() else RECIPE, args.overrides)


def check_python(*arguments):
    if arguments[0] != "-m":
        assert (ROOT / arguments[0]).exists(), arguments[0]
    elif (ROOT / arguments[1].replace(".", "/")).with_suffix(".py").exists():
        check_module(*arguments[1:])
    else:
        assert importlib.util.find_spec(arguments[1]) is not None, arguments[1]


def check_make(*arguments):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wanted = [a for a in arguments if "=" not in a]
    assert set(wanted) <= set(targets)


def check_pip(*arguments):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\[([\w,-]+)\]", " ".join(arguments)):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def check_activate(path):
    venv = re.search(r"^VENV := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert path == f"{venv[1]}/bin/activate"


def check_file(*arguments):
    assert (ROOT / ".ci/run").exists()


COMMANDS = {
    "python": check_python,
    "dflash-jax": lambda *arguments: check_module("dflash_jax.cli", *arguments),
    "make": check_make,
    "pip": check_pip,
    ".ci/run": check_file,
    "printf": lambda *arguments: None,
    ".": check_activate,
}


@in_language("", *SHELL)
def test_commands_parse(block):
    for words in commands(block):
        if words:  # else a comment
            assert words[0] in COMMANDS, f"{block}: {words[0]} is no command that can be tried"
            COMMANDS[words[0]](*words[1:])


@in_language("toml")
def test_recipes_are_read(block, tmp_path):
    values = tomllib.loads(block.text)
    fields = {f.name for f in dataclasses.fields(TrainConfig)}
    assert set(values) <= fields
    if block.runs:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(("" if "run" in values else 'run = "runs/x"\n') + block.text)
        read_recipe(recipe)


@in_language("jsonl")
def test_lines_of_data_are_read(block, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(block.text)
    for where, row in read_rows(path):
        assert question(where, row)


def test_links_lead_somewhere():
    links = [(page, t.attrs["href"]) for page, t in inline("link_open")]
    images = [(page, t.attrs["src"]) for page, t in inline("image")]
    for page, link in links + images:
        path, _, anchor = link.partition("#")
        if "://" not in path:
            file = page if not path else (page.parent / path).resolve()
            assert file.exists(), f"{page}: {link}"
            if anchor and page.parent == ROOT:  # mkdocs checks those of the site
                assert anchor in anchors_of(file), f"{page}: {link}"


def anchors_of(page):
    """The anchors of a page's headings, as GitHub makes them."""
    tokens = parse(page)
    titles = [t.content for i, t in enumerate(tokens) if i and tokens[i - 1].type == "heading_open"]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_files_that_are_named_exist():
    ours = re.compile(r"(dflash_jax|train|convert|benchmarks|tests|docs)/[\w./-]*\w")
    for page, token in inline("code_inline"):
        if ours.fullmatch(token.content):
            assert (ROOT / token.content).exists(), f"{page}: {token.content}"


def test_messages_that_are_explained_are_the_codes():
    sources = [p for f in ("dflash_jax", "train", "convert") for p in (ROOT / f).rglob("*.py")]
    code = "".join(p.read_text() for p in [*sources, ROOT / "Makefile"])
    code = re.sub(r'"\s+f?"', "", code)  # a string in parts
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]*)`", text, re.MULTILINE)
    assert len(messages) > 30
    parts = {part.strip() for message in messages for part in message.split("...")}
    assert {part for part in parts if part not in code} == set()


def test_the_tables_of_the_site_are_made():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    places = [place for page in PAGES for place in hooks.PLACE.findall(page.read_text())]
    assert sorted(places) == sorted(hooks.TABLES)
    text = hooks.on_page_markdown("<!-- table: recipe -->\n\n```python no-run\nx\n```")
    assert "```python\n" in text
    for field in dataclasses.fields(TrainConfig):
        assert f"`{field.name}`" in text


def test_the_tokenizer_of_the_examples_is_the_embedded_one(tiny):
    assert len(load_tokenizer(tiny[0])) == VOCABULARY
