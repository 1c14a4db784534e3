"""Builds the prompts from which a draft for a small chat model is trained.

A prompt is one user message; the target writes the response later. Chat prompts are topics times
phrasings, math prompts are number-filled templates and reasoning-gym tasks, code prompts are
function requests and HumanEval-like stubs. The tables are in `data/topics.json`. Every prompt
belongs to a group (its template and topic, or its function), and `split` reserves whole groups by
a hash, so what is held out stays held out whatever else is built.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

KINDS = ("chat", "math", "code")
MAX_PIECES = 92
SHINGLE_WORDS = 10
RESERVED_FRACTION = 0.05
TABLES = Path(__file__).parent / "data" / "topics.json"
_DATA = Path(__file__).parent.parent / "dflash_jax" / "data"
BENCHMARK_FILES = tuple(_DATA / f"{name}.jsonl" for name in ("humaneval", "gsm8k", "mtbench"))
EVALUATION_FILES = (_DATA / "held_out.jsonl", *BENCHMARK_FILES)

_ANSWER_FORMAT = re.compile(
    r"(?<=[.?!:\s])\s*(Give (only|the) |Give your |Reply with |Do not |Your output |Return only |Only "
    r"reply |Answer in |Answer with |Report |Please respond |Respond with |Write only |Return your |"
    r"Provide your ).*",
    re.DOTALL,
)

# Kinds of numbers, in words and as a test.
FILTERS: dict[str, tuple[str, Callable[[int], bool]]] = {
    "even": ("even numbers", lambda n: n % 2 == 0),
    "odd": ("odd numbers", lambda n: n % 2 == 1),
    "positive": ("positive numbers", lambda n: n > 0),
    "negative": ("negative numbers", lambda n: n < 0),
    "nonzero": ("numbers that are not zero", lambda n: n != 0),
    "prime_only": ("prime numbers", lambda n: n > 1 and all(n % d for d in range(2, n))),
    "square_only": ("perfect squares", lambda n: n >= 0 and math.isqrt(n) ** 2 == n),
    "two_digit": ("two-digit numbers", lambda n: 10 <= abs(n) <= 99),
    "above_ten": ("numbers greater than 10", lambda n: n > 10),
    "below_five": ("numbers smaller than 5", lambda n: n < 5),
    "multiple_of_three": ("multiples of three", lambda n: n % 3 == 0),
    "multiple_of_five": ("multiples of five", lambda n: n % 5 == 0),
}
AGGREGATES: dict[str, tuple[str, str, Callable[[list[int]], object]]] = {
    "sum": ("int", "Return the sum of the {f} in a list", sum),
    "product": ("int", "Multiply all {f} in a list", math.prod),
    "count": ("int", "Count the {f} in a list of integers", len),
    "largest": ("int", "Find the largest of the {f} in a list", lambda x: max(x, default=None)),
    "smallest": ("int", "Find the smallest of the {f} in a list", lambda x: min(x, default=None)),
    "average": ("float", "Compute the average of the {f} in a list", lambda x: sum(x) / len(x)),
    "keep": ("list", "Return a new list with only the {f}", list),
    "sorted": ("list", "Return the {f} of a list in increasing order", sorted),
    "reversed": ("list", "Return the {f} of a list in reverse order", lambda x: x[::-1]),
    "squared": ("list", "Return the squares of the {f} in a list", lambda x: [n * n for n in x]),
    "doubled": ("list", "Return a list with all {f} doubled", lambda x: [2 * n for n in x]),
    "any": ("bool", "Check whether a list contains any {f}", bool),
}
CHARACTERS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "vowel": ("vowels", lambda c: c.lower() in "aeiou"),
    "consonant": ("consonants", lambda c: c.isalpha() and c.lower() not in "aeiou"),
    "digit": ("digits", str.isdigit),
    "uppercase": ("uppercase letters", str.isupper),
    "lowercase": ("lowercase letters", str.islower),
    "space": ("spaces", str.isspace),
    "letter": ("letters", str.isalpha),
    "symbol": ("characters that are neither letters nor digits", lambda c: not c.isalnum()),
}
Test = Callable[[str], bool]
_SAMPLE_TEXTS = ("Hi Bob 42!", "Room 7, Floor 2", "a1 B2 c3?", "Green Tea: 3.50", "x = Y + 10")
EDITS: dict[str, tuple[str, str, Callable[[str, Test], object]]] = {
    "remove": ("str", "Remove all {f} from a string", lambda s, t: _edit(s, t, "")),
    "keep": ("str", "Keep only the {f} of a string", lambda s, t: "".join(filter(t, s))),
    "star": ("str", "Replace all {f} in a string with stars", lambda s, t: _edit(s, t, "*")),
    "double": ("str", "Repeat all {f} in a string twice", lambda s, t: _edit(s, t, None)),
    "count": ("int", "Count the {f} in a string", lambda s, t: sum(map(t, s))),
    "has": ("bool", "Check whether a string contains any {f}", lambda s, t: any(map(t, s))),
    "positions": (
        "list",
        "Return the positions of all {f} in a string",
        lambda s, t: [i for i, c in enumerate(s) if t(c)],
    ),
    "distinct": (
        "int",
        "Count how many different {f} occur in a string",
        lambda s, t: len(set(filter(t, s))),
    ),
}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One user message.

    Attributes:
        id: `kind-group-text`, the last two being hashes: of the group and of the normalised text.
        kind: One of `KINDS`.
        text: The message.
        source: The table or the generator that it was made from.
    """

    id: str
    kind: str
    text: str
    source: str


@dataclasses.dataclass(frozen=True)
class Family:
    """Candidate prompts of one source, in a fixed random order.

    Attributes:
        weight: Share of the kind's prompts, relative to the other families.
        candidates: Pairs of group and text. Families may share groups.
    """

    weight: float
    candidates: Sequence[tuple[str, str]]


def normalise(text: str) -> str:
    """Returns the text in lower case with everything but words and operators dropped."""
    return " ".join(re.findall(r"[a-z0-9_]+|[-+*/^=<>]", text.lower()))


def shingles(text: str, size: int = SHINGLE_WORDS) -> set[str]:
    """Returns all runs of `size` words, numbers written as #, that are not mostly numbers."""
    words = re.sub(r"\b\d+\b", "#", re.sub(r"[^a-z0-9_]+", " ", text.lower())).split()
    runs = [words[i : i + size] for i in range(len(words) - size + 1)]
    return {" ".join(run) for run in runs if run.count("#") <= size // 2}


def build(counts: Mapping[str, int], seed: int) -> list[Prompt]:
    """Builds distinct prompts, the same ones for the same arguments.

    Args:
        counts: Number of prompts of each kind. More prompts of a kind extend fewer ones, up to
            rounding between the sources.
        seed: Of the choice and of the order, in which the kinds are mixed.

    Raises:
        ValueError: If a kind is unknown or its sources hold too few prompts.
    """
    if unknown := set(counts) - set(KINDS):
        raise ValueError(f"{sorted(unknown)=} are not among {KINDS=}")
    banned = evaluation_shingles()
    prompts = []
    for kind, count in counts.items():
        prompts += _choose(kind, count, _FAMILIES[kind](seed, count), banned)
    random.Random(f"{seed}/order").shuffle(prompts)
    return prompts


def split(prompts: Sequence[Prompt], held_out_per_kind: int) -> tuple[list[Prompt], list[Prompt]]:
    """Splits prompts into training and held-out ones, by a hash of their group.

    A fixed fraction of all groups is reserved: their prompts are never trained on. The held-out
    prompts are the first of the reserved ones by a hash of the text, at most one of a group; the
    other reserved prompts are dropped.

    Raises:
        ValueError: If a kind has fewer reserved groups than `held_out_per_kind`.
    """
    train = [p for p in prompts if not _is_reserved(p)]
    held_out: list[Prompt] = []
    for kind in sorted({p.kind for p in prompts}):
        groups: dict[str, Prompt] = {}
        for prompt in sorted(prompts, key=lambda p: p.id.split("-")[2]):
            if prompt.kind == kind and _is_reserved(prompt):
                groups.setdefault(_group_hash(prompt), prompt)
        if len(groups) < held_out_per_kind:
            raise ValueError(f"{kind}: {len(groups)} reserved groups, {held_out_per_kind=}")
        held_out += list(groups.values())[:held_out_per_kind]
    return train, held_out


def evaluation_shingles() -> set[str]:
    """Returns the shingles of the committed evaluation texts, which no prompt may share."""
    lines = [x for path in BENCHMARK_FILES for x in path.read_text("utf-8").splitlines()]
    return set().union(*(shingles(json.loads(line)["text"]) for line in lines))


def write_jsonl(path: Path, prompts: Iterable[Prompt]) -> None:
    """Writes one JSON object a line; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    lines = [json.dumps(dataclasses.asdict(p), ensure_ascii=False) + "\n" for p in prompts]
    partial.write_text("".join(lines), encoding="utf-8")
    os.replace(partial, path)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _group_hash(prompt: Prompt) -> str:
    return prompt.id.split("-")[1]


def _is_reserved(prompt: Prompt) -> bool:
    return int(_group_hash(prompt), 16) < RESERVED_FRACTION * 16**10


def _count_pieces(text: str) -> int:
    """Returns about the number of tokens: words, single digits, marks, line breaks."""
    return len(re.findall(r"[A-Za-z]{1,8}|\d|[^\sA-Za-z\d]|\n", text))


def _choose(
    kind: str, count: int, families: Mapping[str, Family], banned: set[str]
) -> list[Prompt]:
    """Takes candidates from the families in turn, in proportion to their weights."""
    seen: set[str] = set()
    streams = {name: iter(family.candidates) for name, family in families.items()}
    taken = dict.fromkeys(families, 0)
    prompts: list[Prompt] = []
    while len(prompts) < count:
        if not streams:
            raise ValueError(f"{kind}: only {len(prompts)} distinct prompts, {count=}")
        name = min(streams, key=lambda name: (taken[name] + 1) / families[name].weight)
        for group, text in streams[name]:
            key = normalise(text)
            if key in seen or _count_pieces(text) > MAX_PIECES or shingles(text) & banned:
                continue
            seen.add(key)
            taken[name] += 1
            prompts.append(Prompt(f"{kind}-{_hash(group)}-{_hash(key)}", kind, text, name))
            break
        else:
            del streams[name]
    return prompts


@functools.cache
def _tables() -> dict:
    return json.loads(TABLES.read_text())


def _shuffled(rng: random.Random, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    pairs = list(pairs)
    return rng.sample(pairs, len(pairs))


def _alone(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Makes every text its own group."""
    return [(normalise(text), text) for text in texts]


def _chat_families(seed: int, count: int) -> dict[str, Family]:
    """Topics times phrasings, some with a wish added; a family weighs the root of its size."""
    del count
    rng = random.Random(f"{seed}/chat")
    tables = _tables()["chat"]
    families = {}
    for name, topics in tables["topics"].items():
        is_short = name not in ("sentence", "passage")
        pairs = []
        for i, intent in enumerate(tables["intents"][name]):
            for topic in topics:
                text = _capitalise(intent.replace("{t}", topic))
                if is_short and rng.random() < 0.3:
                    text = rng.choice(tables["modifiers"]).replace("{q}", text)
                pairs.append((f"{name}/{i}/{topic}", text))
        families[f"chat/{name}"] = Family(math.sqrt(len(pairs)), _shuffled(rng, pairs))
    questions = _shuffled(rng, _alone(tables["questions"]))
    families["chat/question"] = Family(math.sqrt(4 * len(questions)), questions)
    return families


def _capitalise(text: str) -> str:
    return text[0].upper() + text[1:]


def _math_families(seed: int, count: int) -> dict[str, Family]:
    """Number-filled templates, each used equally often, and reasoning-gym tasks.

    Not `gsm_symbolic`: its problems are rewordings of GSM8K test questions.
    """
    try:
        import reasoning_gym
    except ImportError as e:
        raise ValueError(f"building prompts needs {e.name}: pip install -e '.[prompts]'") from None

    tables = _tables()["math"]
    families = {}
    for name, weight in (("templates", 14), ("stories", 14)):
        rng = random.Random(f"{seed}/{name}")
        texts = []
        while len(texts) < count:
            texts += [_fill(rng, t, tables) for t in rng.sample(tables[name], len(tables[name]))]
        families[f"math/{name}"] = Family(weight, _alone(texts))
    for name, (weight, settings) in tables["generators"].items():
        size = int(count * weight / 10) + 50
        first = int(_hash(f"{seed}/{name}")[:7], 16)
        tasks = reasoning_gym.create_dataset(name, size=size, seed=first, **settings)
        texts = [_ANSWER_FORMAT.sub("", tasks[i]["question"]).strip() for i in range(size)]
        families[f"reasoning-gym/{name}"] = Family(weight, _alone(texts))
    return families


def _fill(rng: random.Random, template: str, tables: Mapping[str, Sequence[str]]) -> str:
    """Replaces {name}, {other}, {items}, {place} and number ranges such as {2-12}."""
    name, other = rng.sample(tables["names"], 2)
    words = {"name": name, "other": other}
    words |= {"items": rng.choice(tables["items"]), "place": rng.choice(tables["places"])}

    def value(match: re.Match) -> str:
        low, dash, high = match[1].partition("-")
        return str(rng.randint(int(low), int(high))) if dash else words[low]

    text = _capitalise(re.sub(r"\{([a-z]+|\d+-\d+)\}", value, template))
    style = rng.choice(tables["styles"])
    if not text.endswith((".", "?")) and not style.endswith("{q}"):
        style = style.replace("{q}", "{q}.")
    return style.replace("{q}", text)


def _code_families(seed: int, count: int) -> dict[str, Family]:
    """Function requests and stubs, classes, snippets to explain, parts of the language.

    A function is one group, whether asked for in words or as a stub.
    """
    del count
    rng = random.Random(f"{seed}/code")
    tables = _tables()["code"]
    written = [line.split("|") for line in tables["functions"]]
    generated = [*_number_functions(), *_string_functions(), *_other_functions(tables)]
    families = {}
    for name, rows, weights in (
        ("function", written, (17, 22)),
        ("generated", generated, (14, 20)),
    ):
        requests = [(row[0], _request(row, p)) for row in rows for p in tables["phrasings"]]
        stubs = [(row[0], _stub(rng, row, s)) for row in rows for s in tables["stubs"]]
        families[f"code/{name}-request"] = Family(weights[0], _shuffled(rng, requests))
        families[f"code/{name}-stub"] = Family(weights[1], _shuffled(rng, stubs))
    classes = [
        (what, text.format(what=what, methods=methods))
        for what, methods in (line.split("|") for line in tables["classes"])
        for text in tables["class_phrasings"]
    ]
    snippets = [
        (snippet, f"{task}\n```python\n{snippet}\n```")
        for snippet in tables["snippets"]
        for task in tables["snippet_tasks"]
    ]
    concepts = [
        (f"{i}/{concept}", task.replace("{t}", concept))
        for i, task in enumerate(tables["concept_tasks"])
        for concept in tables["concepts"]
    ]
    families["code/class"] = Family(6, _shuffled(rng, classes))
    families["code/snippet"] = Family(10, _shuffled(rng, snippets))
    families["code/concept"] = Family(10, _shuffled(rng, concepts))
    return families


def _number_functions() -> Iterator[list[str]]:
    """Yields name, arguments, return type, description and example of list functions."""
    for task, (returns, text, combine) in AGGREGATES.items():
        for name, (words, test) in FILTERS.items():
            rng = random.Random(f"{task}/{name}")
            numbers = rng.sample(range(-9, 31), rng.randint(4, 6))
            chosen = [n for n in numbers if test(n)]
            example = f"{numbers} => {combine(chosen)!r}" if chosen else ""
            if "." in example[-5:] and not example.endswith((".0", ".5")):
                example = ""
            if (task, name) != ("keep", "positive"):  # HumanEval/30
                yield [f"{task}_{name}", "numbers: list", returns, text.format(f=words), example]


def _string_functions() -> Iterator[list[str]]:
    for edit, (returns, words, apply) in EDITS.items():
        for name, (f, test) in CHARACTERS.items():
            text = random.Random(f"{edit}/{name}").choice(_SAMPLE_TEXTS)
            example = f"{text!r} => {apply(text, test)!r}"
            if (edit, name) != ("remove", "vowel"):  # HumanEval/51
                yield [f"{edit}_{name}_chars", "text: str", returns, words.format(f=f), example]


def _other_functions(tables: Mapping) -> Iterator[list[str]]:
    for big, small, factor in tables["units"]:
        text = f"Convert {big} to {small}. One of the {big} is {factor} {small}".replace("_", " ")
        value = f"2.0 => {2 * float(factor)!r}"
        yield [f"{big}_to_{small}", f"{big}: float", "float", text, value]
        text = f"Convert {small} to {big}".replace("_", " ")
        yield [f"{small}_to_{big}", f"{small}: float", "float", text, ""]
    for task, (returns, text) in tables["order_tasks"].items():
        for name, order in tables["orders"].items():
            yield [f"{task}_{name}", "words: list", returns, text.format(f=order), ""]


def _edit(text: str, test: Test, new: str | None) -> str:
    """Replaces the characters that pass the test, or doubles them."""
    return "".join((2 * c if new is None else new) if test(c) else c for c in text)


def _request(row: Sequence[str], phrasing: str) -> str:
    name, args, _, description, _ = row
    return phrasing.format(name=name, args=args, desc=description)


def _stub(rng: random.Random, row: Sequence[str], template: str) -> str:
    """Returns a signature with a docstring, with or without types and an example."""
    name, args, returns, description, example = row
    signature = f"def {name}({args}) -> {returns}:"
    if rng.random() < 0.3:
        signature = f"def {name}({re.sub(r': *[a-z]+', '', args)}):"
    call, _, value = example.partition(" => ")
    doc = [f'"""{description}.', "", f">>> {name}({call})", value, '"""']
    if not example or rng.random() < 0.25:
        doc = [f'"""{description}."""']
    elif rng.random() < 0.3:
        doc = ['"""', f"{description}.", f"For example, {name}({call}) returns {value}.", '"""']
    lines = [signature] + [f"    {line}".rstrip() for line in doc]
    return template.replace("{stub}", "\n".join(lines) + "\n")


_FAMILIES = {"chat": _chat_families, "math": _math_families, "code": _code_families}


def main(argv: Sequence[str] | None = None) -> None:
    """Writes `train.jsonl` and `held_out.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path, help="where the two files go")
    for kind, count in zip(KINDS, (3200, 1600, 1600), strict=True):
        parser.add_argument(f"--{kind}", type=int, default=count, help=f"{kind} prompts to build")
    parser.add_argument("--seed", type=int, default=0, help="of the choice and the order")
    parser.add_argument("--held-out", type=int, default=16, help="held-out prompts of each kind")
    args = parser.parse_args(argv)
    prompts = build({kind: getattr(args, kind) for kind in KINDS}, args.seed)
    parts = dict(zip(("train", "held_out"), split(prompts, args.held_out), strict=True))
    for name, part in parts.items():
        write_jsonl(args.out_dir / f"{name}.jsonl", part)
        print(name, len(part), dict(sorted(Counter(p.kind for p in part).items())))
    for source, number in sorted(Counter(p.source for p in parts["train"]).items()):
        print(f"{number:6} {source}")


if __name__ == "__main__":
    main()
