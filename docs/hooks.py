"""Tables that the site takes from the code, so that they cannot go stale; a hook of mkdocs.

A page has `<!-- table: recipe -->` where one belongs. The marks behind a code block's language, which
`tests/test_documentation.py` reads, are taken away: the highlighter would refuse them.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from train.config import CHOICES, FREE, HEAD_KINDS, TrainConfig
from train.losses import LOSSES, NORMALIZERS, OF_ONE_TOKEN, OF_THE_DATA, WEIGHTS

PLACE = re.compile(r"<!-- table: (\w+) -->")
_MARK = re.compile(r"^(```+\w+) no-run$", re.MULTILINE)
# What their functions do not say by themselves; a name that is missing here is a KeyError.
_WEIGHTS = {
    "decay": "exp(-slot / `gamma`), from the first slot that is predicted",
    "none": "1 for every slot",
    "dpace": "D-PACE: what a slot adds to the expected accepted length, by the draft's own confidence, smoothed by `dpace_alpha`",
    "dpace_reach": "D-PACE's one half: the probability that all slots up to this one are right",
    "dpace_continuation": "D-PACE's other half: `dpace` given that the slot is reached and right",
}
_NORMALIZERS = {
    "weights": "the sum of the slots' weights, as NeMo Automodel and SpecForge do",
    "count": "the number of supervised slots, as speculators does: with one `gamma`, smaller gradients",
    "sequences": "the number of rows, as SpecForge's D-PACE does",
}
# Names in the recipe's docstring that the reference has.
_LINKS = {
    "chat.read_documents": "train.chat.read_documents",
    "regenerate.regenerate": "train.regenerate.regenerate",
    "objective.Objective": "train.objective.Objective",
    "DraftConfig": "dflash_jax.config.DraftConfig",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = _MARK.sub(r"\1", markdown)
    return PLACE.sub(lambda place: TABLES[place[1]](), markdown)


def attributes(cls: type) -> Iterator[tuple[list[str], str]]:
    """(names, text) of each entry of a class's `Attributes:`."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    for entry in re.split(r"\n    (?! )", "\n" + section)[1:]:
        names, _, text = " ".join(entry.split()).partition(": ")
        yield names.split(", "), text


def recipe() -> str:
    """Every key of a recipe: its default, and what the class says of it."""
    fields = {f.name: f for f in dataclasses.fields(TrainConfig)}
    said = {name for names, _ in attributes(TrainConfig) for name in names}
    if said != set(fields):
        raise ValueError(f"TrainConfig's docstring and fields differ in {said ^ set(fields)}")
    return _table(
        ("key and default", "what it is"),
        (
            ("<br>".join(_assigned(fields[name]) for name in names), _with_choices(names, text))
            for names, text in attributes(TrainConfig)
        ),
    )


def _assigned(field: dataclasses.Field) -> str:
    made = field.default_factory
    value = field.default if made is dataclasses.MISSING else made()
    if value is dataclasses.MISSING:
        return f"`{field.name}` (required)"
    return f"`{field.name}` = {'none' if value is None else f'`{toml(value)}`'}"


def _with_choices(names: Iterable[str], text: str) -> str:
    """A key's text, with links and the values that it leaves unsaid."""
    told = [
        f"`{name}`: {', '.join(f'`{choice}`' for choice in CHOICES[name])}."
        for name in names
        if not all(choice in text for choice in CHOICES.get(name, ()))
    ]
    for name, where in _LINKS.items():
        text = text.replace(f"`{name}`", f"[`{name}`][{where}]")
    return " ".join((text, *told))


def toml(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)  # tuples as lists


def losses() -> str:
    def reads(name: str) -> str:
        return "the data's token" if name in OF_THE_DATA else "the target's logits"

    return _table(
        ("name", "loss of a slot", "it reads", "has a confidence for D-PACE"),
        (
            (f"`{name}`", _first_line(f), reads(name), "yes" if name in OF_ONE_TOKEN else "no")
            for name, f in LOSSES.items()
        ),
    )  # fmt: skip


def weights() -> str:
    return _table(("name", "weight of a slot"), ((f"`{n}`", _WEIGHTS[n]) for n in WEIGHTS))


def normalizers() -> str:
    rows = ((f"`{n}`", _NORMALIZERS[n]) for n in NORMALIZERS)
    return _table(("name", "what divides the weighted sum"), rows)


def heads() -> str:
    def number(field: dataclasses.Field) -> str:
        required = field.default is dataclasses.MISSING
        return f"`{field.name}`" + ("" if required else f" = `{toml(field.default)}`")

    return _table(
        ("kind", "what it does", "its numbers"),
        (
            (f"`{kind}`", _first_line(head), ", ".join(number(f) for f in dataclasses.fields(head)))
            for kind, head in HEAD_KINDS.items()
        ),
    )


def free() -> str:
    return ", ".join(f"`{name}`" for name in sorted(FREE - {"run"}))


def _first_line(what: Any) -> str:
    return inspect.cleandoc(what.__doc__).split("\n")[0]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
    )


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f for f in (recipe, losses, weights, normalizers, heads, free)
}
