"""`dflash-jax chat`: the same tokens as if the whole history was the prompt."""

import builtins
import dataclasses
import io
import sys

import fakes
import jax
import pytest
from fakes import random_draft, random_target

from dflash_jax.cli import chat, decoding, main
from dflash_jax.generation import Generation, generate, stream
from dflash_jax.sampling import Sampling
from dflash_jax.text import Detokenizer, encode_chat

STOP = 7
# A layer each: most of the time goes into compiling.
TARGET = dataclasses.replace(
    random_target(dataclasses.replace(fakes.TARGET, num_hidden_layers=1, layer_types=())),
    stop_token_ids=(STOP,),
)
DRAFT = random_draft(
    dataclasses.replace(
        fakes.DRAFT,
        num_hidden_layers=1,
        layer_types=(),
        target_layer_ids=(0,),
        num_target_layers=1,
        block_size=4,
    )
)
OPTIONS = {"max_new_tokens": 20, "sampling": Sampling(temperature=0.8), "key": jax.random.key(3)}


class Letters:
    """A tokenizer of a letter an id, so text and tokens are the same; its template begins a turn with 60, 61 or 62."""

    chat_template = "yes"

    def __init__(self, forgetful: bool = False):
        self.forgetful = forgetful  # drops earlier answers, as some templates drop thoughts

    def decode(self, ids):
        return "".join(chr(0x4E00 + i) for i in ids)

    def encode(self, text):
        return [ord(c) - 0x4E00 if ord(c) >= 0x4E00 else ord(c) % 60 for c in text]

    def apply_chat_template(self, messages, **_):
        ids = []
        for m in messages:
            dropped = self.forgetful and m["role"] == "assistant"
            ids += [] if dropped else [60 + len(m["role"]) % 3, *self.encode(m["content"])]
            ids += [STOP] if m["role"] == "assistant" else []
        return [*ids, 60]


@pytest.fixture
def asked(monkeypatch):
    """The prompts that reach `stream`."""
    prompts = []

    def spy(target, draft, prompt, **options):
        prompts.append((list(prompt), options["state"] is not None))
        return stream(target, draft, prompt, **options)

    monkeypatch.setattr(chat, "stream", spy)
    return prompts


def conversation(tokenizer=None, **changes):
    given = {"draft": DRAFT, "options": OPTIONS, **changes}
    return chat.Conversation(TARGET, tokenizer=tokenizer or Letters(), **given)


def whole(talk, messages) -> list[int]:
    """The answer to a history that is one prompt."""
    ids = encode_chat(talk.tokenizer, messages)
    return generate(talk.target, DRAFT, [ids], **talk.options).tokens[0]


def silent(text, drafted):
    pass


@pytest.mark.parametrize("forgetful", [False, True])
def test_each_answer_is_that_to_the_whole_history(asked, forgetful):
    talk = conversation(Letters(forgetful), system="be")
    for turn, message in enumerate(("hello", "and then", "why")):
        before = [*talk.messages, {"role": "user", "content": message}]
        out = talk.ask(message, silent)
        assert out.tokens[0] == whole(talk, before)
        prompt, continued = asked[-1]
        assert continued is (turn > 0 and not forgetful)
        # What the caches hold is not asked again.
        full = encode_chat(talk.tokenizer, before)
        assert len(prompt) < len(full) if continued else prompt == full
    assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 3]


def test_an_answer_that_was_stopped_stays_as_far_as_it_came(asked):
    talk = conversation()
    heard = []

    def impatient(text, drafted):
        heard.append(text)
        if sum(map(len, heard)) >= 4:
            raise KeyboardInterrupt

    talk.ask("hello", silent)
    with pytest.raises(KeyboardInterrupt):
        talk.ask("go on", impatient)
    assert talk.messages[-1] == {"role": "assistant", "content": "".join(heard)}
    before = [*talk.messages, {"role": "user", "content": "more"}]
    assert talk.ask("more", silent).tokens[0] == whole(talk, before)
    talk.reset()
    assert (talk.messages, talk.state, talk.known, talk.done) == ([], None, [], [])


def test_an_answer_that_is_stopped_before_its_first_word_leaves_nothing(monkeypatch):
    talk = conversation()
    talk.ask("hello", silent)
    before = list(talk.messages)

    def compiling(*args, real=chat.stream, **options):
        next(real(*args, **options))  # consumes the state
        raise KeyboardInterrupt
        yield

    with monkeypatch.context() as patch:
        patch.setattr(chat, "stream", compiling)
        with pytest.raises(KeyboardInterrupt):
            talk.ask("go on", silent)
    assert talk.messages == before
    assert talk.ask("more", silent).tokens[0] == whole(talk, [*before, {"role": "user", "content": "more"}])  # fmt: skip


def test_a_full_context_is_told_and_the_message_not_kept():
    talk = conversation()
    with pytest.raises(
        ValueError, match=r"context is full: .* has 602 tokens, .* 512 positions; /reset"
    ):
        talk.ask("x" * 600, silent)
    assert talk.messages == []


@pytest.mark.parametrize(
    ("known", "count", "finish", "said"),
    [(512, 5, "length", "512 positions is full"), (40, 20, "length", "cut at 20 tokens"), (40, 5, "stop", "")],
)  # fmt: skip
def test_an_answer_that_was_cut_says_by_what(known, count, finish, said, monkeypatch, capsys):
    talk = conversation()

    def ask(message, write):
        talk.known = [0] * known
        return Generation([[0] * count], [finish], [[1]])

    monkeypatch.setattr(talk, "ask", ask)
    chat.answer(talk, "hello", stats=False, tinted=False)
    err = capsys.readouterr().err
    assert said in err
    assert bool(err) is bool(said)


def test_drafted_text_is_tinted_and_the_rest_is_plain(capsys):
    def pieces():
        yield [1]
        yield [2, 3, 4]
        yield [5, STOP]
        return answer

    class Digits:
        def decode(self, ids):
            return "".join(map(str, ids))

    answer = Generation([[1, 2, 3, 4, 5, STOP]], ["stop"], [[3, 2]])
    for tinted, text in ((True, "1\x1b[32m23\x1b[39m4\x1b[32m5\x1b[39m"), (False, "12345")):
        words, write = Detokenizer(Digits()), decoding.printer(tinted)
        assert decoding.speak(pieces(), words, [STOP], write) is answer
        assert capsys.readouterr().out == text


@pytest.fixture
def loaded(monkeypatch):
    talk = conversation()
    monkeypatch.setattr(decoding, "load", lambda args: (talk.target, DRAFT, Letters()))
    return ["chat", "--max-new-tokens", "20", "--temperature", "0.8", "--seed", "3"]


def test_piped_lines_are_messages_and_answers_are_all_of_stdout(loaded, monkeypatch, capsys):
    talk = conversation()
    expected = []
    for message in ("hello", "why"):
        talk.ask(message, silent)
        expected.append(talk.messages[-1]["content"])
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("hello\n\n/stats\n/nonsense\nwhy\n/quit\nnever\n")
    )
    assert main(loaded) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == expected
    assert "answers: 1, " in err
    assert "/nonsense is no command" in err


def test_on_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(loaded, monkeypatch, capsys):
    typed = iter([KeyboardInterrupt, "hello", "x" * 600, "why", EOFError])

    def read(prompt=""):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    def obey(talk, line, stats, tinted, real=chat.obey):
        if line == "why":
            raise KeyboardInterrupt
        return real(talk, line, stats, tinted)

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr(chat, "obey", obey)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(loaded) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2  # an answer, and the end of the stopped one's line
    assert [w in err for w in ("Ctrl-D leaves", "context is full", "stopped")] == [True] * 3
