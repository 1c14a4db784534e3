"""Conversations and plain text as token ids and a loss mask.

Supervised is what the target itself would write: an assistant turn behind its generation prompt, up
to and with the token that ends it. Whatever the template adds (headers, the line break behind a turn,
the empty think block of a turn that does not think) is context, and so is what a tool returns.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from train.store import Example, read_shard

Message = dict[str, str]
Thinking = Literal["keep", "strip"]
Turns = Literal["all", "last"]
TooLong = Literal["drop", "cut"]

ROLES = {name: name for name in ("system", "user", "assistant", "tool")}
SHAREGPT_ROLES = ROLES | {
    "human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"
}  # fmt: skip
# Key of a line: its turns' keys for role and content, and the roles' names.
_FORMS = {
    "messages": ("role", "content", ROLES),
    "conversations": ("from", "value", SHAREGPT_ROLES),
}
_MARK = "\u2420end\u2420"  # stands behind a turn's content in a probe of the template
_THOUGHT = re.compile(r"^.*</think>\s*", re.DOTALL)


@dataclasses.dataclass
class Report:
    """What became of files' lines: `cut` ones are kept, `dropped` and `unsupervised` ones are not.

    `tokens` and `supervised` are those of the kept ones.
    """

    kept: int = 0
    cut: int = 0
    dropped: int = 0
    unsupervised: int = 0
    tokens: int = 0
    supervised: int = 0

    def __add__(self, other: "Report") -> "Report":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        return Report(*(a + b for a, b in pairs))


def read_files(
    paths: Sequence[Path], tokenizer: Any, max_length: int, **options: Any
) -> tuple[list[Example], Report]:
    """`read_documents` of several files, and the sum of their reports.

    Raises:
        ValueError: If two files have one name, by which their documents are called.
    """
    names = [path.name for path in paths]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two data files are called {twice[0]}")
    parts = [read_documents(path, tokenizer, max_length, **options) for path in paths]
    documents = [document for part, _ in parts for document in part]
    return documents, sum((report for _, report in parts), Report())


def read_documents(
    path: Path,
    tokenizer: Any,
    max_length: int,
    *,
    too_long: TooLong = "drop",
    thinking: Thinking = "keep",
    turns: Turns = "all",
) -> tuple[list[Example], Report]:
    """The documents of a JSON lines file, of a `.txt` file with a text a line, or of a `.safetensors` shard.

    A JSON line holds `messages` (role and content, for thinking models also `reasoning_content`),
    `conversations` (ShareGPT's from and value) or `text`. A text is taken as the tokenizer has it,
    without the template, and all of it is supervised. A shard is in the layout of `store`, the target's
    answers that come with a recipe for instance; features that it holds are not read.

    Args:
        tokenizer: transformers' form.
        max_length: Most tokens of a document.
        too_long: Whether a longer one is left out or loses its end; either is counted and reported.
        thinking: `strip` takes the reasoning out of the assistant's turns first, as where the target
            decodes with thinking off.
        turns: Which assistant turns are supervised. Some templates (Qwen3's) show earlier turns
            without their reasoning, which is not how the target wrote them: `last` leaves those out.

    Returns:
        The documents with anything to learn from (two supervised tokens in a row), without features,
        and the counts, which are also said on stderr.

    Raises:
        ValueError: If a line is malformed, or a template does not show where its turns begin and end.
    """
    if max_length < 2:
        raise ValueError(f"{max_length=} is less than 2")
    documents, report = [], Report()
    for name, kind, ids, supervised in _tokenized(path, tokenizer, thinking, turns):
        long = len(ids) > max_length
        if long and too_long == "drop":
            report.dropped += 1
            continue
        mask = np.array(supervised[:max_length], bool)
        if not (mask[1:] & mask[:-1]).any():
            report.unsupervised += 1
            continue
        report.cut += long
        tokens = np.array(ids[:max_length], np.int32)
        documents.append(Example.bare(name, kind, tokens, mask))
    report.kept = len(documents)
    report.tokens = sum(len(d.tokens) for d in documents)
    report.supervised = sum(int(d.supervised.sum()) for d in documents)
    print(
        f"{path}: {report.kept} documents, {report.tokens} tokens, {report.supervised} of them supervised;"
        f" of over {max_length} tokens {report.dropped} left out and {report.cut} cut;"
        f" {report.unsupervised} left out with nothing to learn from",
        file=sys.stderr,
    )
    return documents, report


def read_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """Where each line is and what it holds; a line of a `.txt` file is a text."""
    # Not splitlines, which also cuts at the line separators that JSON leaves inside a text.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        if path.suffix == ".txt":
            yield where, {"text": line}
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            raise ValueError(f"{where}: no JSON: {e}") from e
        if not isinstance(row, dict) or not row.keys() & {*_FORMS, "text"}:
            raise ValueError(f"{where}: needs an object with one of {[*_FORMS, 'text']}")
        yield where, row


def _tokenized(
    path: Path, tokenizer: Any, thinking: Thinking, turns: Turns
) -> Iterator[tuple[str, str, Any, Any]]:
    """Id, kind, token ids and what is supervised of each document of a file."""
    if path.suffix == ".safetensors":
        yield from ((e.id, e.kind, e.tokens, e.supervised) for e in read_shard(path))
        return
    for where, row in read_rows(path):
        yield where, path.stem, *_encoded(where, row, tokenizer, thinking, turns)


def _encoded(
    where: str, row: dict, tokenizer: Any, thinking: Thinking, turns: Turns
) -> tuple[list[int], list[bool]]:
    form = _form(row)
    if form is None:
        ids = tokenizer(_text(where, row))["input_ids"]
        return ids, [True] * len(ids)
    messages = _until(where, form, _messages(where, form, row[form]), ["assistant"])
    if thinking == "strip":
        messages = [_without_reasoning(m) for m in messages]
    try:
        return encode_chat(tokenizer, messages, turns)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from e


def question(where: str, row: dict) -> list[Message]:
    """What a target is to answer: a line's text, or its conversation up to the last question.

    Args:
        where: What the line is called in errors.
        row: As of `read_rows`.

    Raises:
        ValueError: If the line is malformed.
    """
    form = _form(row)
    if form is None:
        return [{"role": "user", "content": _text(where, row)}]
    return _until(where, form, _messages(where, form, row[form]), ["user", "tool"])


def _form(row: dict) -> str | None:
    return next((key for key in _FORMS if key in row), None)


def _text(where: str, row: dict) -> str:
    if not isinstance(row["text"], str):
        raise ValueError(f"{where}: text is no string but {type(row['text']).__name__}")
    return row["text"]


def _until(where: str, form: str, messages: list[Message], roles: Sequence[str]) -> list[Message]:
    """Turns up to the last of one of the roles."""
    last = max((i for i, m in enumerate(messages) if m["role"] in roles), default=None)
    if last is None:
        raise ValueError(f"{where}: {form} has no {' or '.join(roles)} turn")
    return messages[: last + 1]


def _messages(where: str, form: str, turns: Any) -> list[Message]:
    """Checked turns."""
    role_key, content_key, roles = _FORMS[form]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: {form} is no list of at least 1 turn")
    messages: list[Message] = []
    for i, turn in enumerate(turns):
        name = f"{where}: {form}[{i}]"
        if not isinstance(turn, dict):
            raise ValueError(f"{name} is no object with {role_key} and {content_key}")
        if turn.get(role_key) not in [*roles]:
            raise ValueError(f"{name}.{role_key} {turn.get(role_key)!r} is none of {[*roles]}")
        if turn.get("tool_calls"):
            raise ValueError(f"{name}.tool_calls: calls beside the content are not supported")
        message: dict[str, Any] = {"role": roles[turn[role_key]], "content": turn.get(content_key)}
        if turn.get("reasoning_content") is not None:
            message["reasoning_content"] = turn["reasoning_content"]
        for key, value in message.items():
            if not isinstance(value, str):
                key = content_key if key == "content" else key
                raise ValueError(f"{name}.{key} is no string but {type(value).__name__}")
        messages.append(message)
    return messages


def _without_reasoning(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    return {"role": "assistant", "content": _THOUGHT.sub("", message["content"])}


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], turns: Turns = "all"
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation under the tokenizer's chat template, and which are supervised.

    A template with `{% generation %}` says itself what the assistant wrote. Else a turn begins where
    its generation prompt ends, the one of thinking off where the text has that, and ends where a
    mark behind its content appears. The ids break at both, as those of a prompt and a response do.

    Raises:
        ValueError: If the text before or after a turn depends on the turn, so that it cannot be
            found; or the tokenizer spells the parts otherwise than the whole; or the template refuses.
    """
    chosen = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    chosen = chosen[-1:] if turns == "last" else chosen
    if re.search(r"\{%-?\+?\s*generation\b", tokenizer.get_chat_template()):
        return _marked(tokenizer, messages, turns)
    text = _render(tokenizer, messages)
    borders = [border for i in chosen for border in _span(tokenizer, messages, i, text)]
    if borders != sorted(borders):
        raise ValueError("the chat template does not show the turns one after another")
    return _encode_parts(tokenizer, text, borders)


def _render(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
    import jinja2

    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except jinja2.TemplateError as e:
        raise ValueError(f"the chat template refuses the conversation: {e}") from e


def _span(tokenizer: Any, messages: Sequence[Message], i: int, text: str) -> tuple[int, int]:
    """Where turn `i` begins and ends in the conversation's text."""
    if i == 0:
        raise ValueError("messages[0] is an assistant turn; it answers nothing")
    prompts = [
        _render(tokenizer, messages[:i], add_generation_prompt=True, enable_thinking=on)
        for on in (True, False)
    ]
    begin = max((len(p) for p in prompts if text.startswith(p)), default=None)
    if begin is None:
        raise ValueError(
            f"the chat template shows what comes before messages[{i}] otherwise once that is there"
        )
    content = messages[i]["content"]
    probe = [*messages[:i], {**messages[i], "content": content + _MARK}, *messages[i + 1 :]]
    before, mark, after = _render(tokenizer, probe).partition(_MARK)
    end = len(text) - len(after)
    shown = mark and begin <= end and text.endswith(after)
    # Some templates trim a turn; nothing else may depend on its content.
    if not shown or text[:end].rstrip() != before.rstrip():
        raise ValueError(f"the chat template does not show where messages[{i}] ends")
    # Else what is asked would stand behind `begin`, and pass for an answer.
    asked = [*messages[: i - 1], {**messages[i - 1], "content": messages[i - 1]["content"] + _MARK}]
    if _MARK not in _render(tokenizer, asked, add_generation_prompt=True):
        raise ValueError(f"the chat template does not show messages[{i - 1}] before its answer")
    return begin, end


def _encode_parts(
    tokenizer: Any, text: str, borders: Sequence[int]
) -> tuple[list[int], list[bool]]:
    """Ids of the parts between borders; every second one is supervised, with the special token behind."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids: list[int] = []
    supervised: list[bool] = []
    for n, (begin, end) in enumerate(zip([0, *borders], [*borders, len(text)])):
        part = tokenizer(text[begin:end], add_special_tokens=False)["input_ids"]
        turn, behind = n % 2 == 1, n % 2 == 0 and n > 0
        if behind and (not part or part[0] not in special):
            raise ValueError("the chat template ends an assistant turn with no special token")
        ids += part
        supervised += [turn or (behind and k == 0) for k in range(len(part))]
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    if ids != whole and tokenizer.decode(ids) != tokenizer.decode(whole):
        raise ValueError("the tokenizer spells a turn otherwise alone than in the conversation")
    return ids, supervised


def _marked(
    tokenizer: Any, messages: Sequence[Message], turns: Turns
) -> tuple[list[int], list[bool]]:
    """Ids and mask of a template that says what the assistant wrote."""
    out = tokenizer.apply_chat_template(
        list(messages), return_dict=True, return_assistant_tokens_mask=True
    )
    mask = np.array(out["assistant_masks"], bool)
    if not mask.any():
        raise ValueError("the chat template's generation block marks nothing")
    if turns == "last":
        gaps = np.flatnonzero(~mask[: np.flatnonzero(mask)[-1]])
        mask[: gaps[-1] + 1 if len(gaps) else 0] = False
    return out["input_ids"], mask.tolist()
