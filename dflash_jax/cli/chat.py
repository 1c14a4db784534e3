"""`dflash-jax chat`: a conversation on a terminal, or of piped lines, each a message."""

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

from dflash_jax.cli import decoding
from dflash_jax.command import colours
from dflash_jax.decode import State
from dflash_jax.generation import Generation, stream
from dflash_jax.pair import Target
from dflash_jax.text import Detokenizer, encode_chat

HELP = """\
/reset   forgets what was said
/stats   tokens, acceptance and speed so far
/quit    leaves, as does Ctrl-D; Ctrl-C stops an answer"""


@dataclasses.dataclass
class Conversation:
    """Messages, and the decoder's state behind the last of them.

    Attributes:
        target, draft: The pair; the draft may be None or "lookup".
        tokenizer: The target's.
        options: Of `stream`.
        system: A system message.
        messages: What was said, in the chat template's form.
        state: Holds `known` in its caches; None if the next answer begins with the whole history.
        known: Token ids.
        done: Of each answer, what `stream` returned without its state, and its seconds.
    """

    target: Target
    draft: Any
    tokenizer: Any
    options: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    state: State | None = None
    known: list[int] = dataclasses.field(default_factory=list)
    done: list[tuple[Generation, float]] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.reset()

    def reset(self) -> None:
        """Forgets all but the system message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        self.messages, self.state, self.known, self.done = system, None, [], []

    def ask(self, text: str, write: decoding.Write) -> Generation:
        """Answers a message: with the tokens that the whole history, as one prompt, would be answered with.

        What the caches hold is not computed again where the template leaves it as it was: it may drop
        an earlier answer's thoughts, or a text may have other tokens than those that made it. After
        Ctrl-C what was written so far is the answer.

        Raises:
            ValueError: If the target has no positions left; the message is then not kept.
            KeyboardInterrupt: Of the user.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = encode_chat(self.tokenizer, messages)
        positions = self.target.config.max_position_embeddings
        if len(ids) >= positions:
            raise ValueError(
                f"the context is full: with this message the conversation has {len(ids)} tokens, and the target "
                f"{positions} positions; /reset begins anew"
            )
        known = len(self.known) if ids[: len(self.known)] == self.known and self.state else 0
        state, self.state = (self.state if known else None), None  # the call consumes it
        heard: list[str] = []

        def hear(piece: str, drafted: bool) -> None:
            heard.append(piece)
            write(piece, drafted)

        start = time.perf_counter()
        try:
            pieces = stream(
                self.target, self.draft, ids[known:], state=state, keep_state=True, **self.options
            )
            out = decoding.speak(
                pieces, Detokenizer(self.tokenizer), self.target.stop_token_ids, hear
            )
            self.state, self.known = out.state, ids + out.tokens[0]
            self.done.append((dataclasses.replace(out, state=None), time.perf_counter() - start))
            return out
        finally:
            if answer := "".join(heard):
                self.messages = [*messages, {"role": "assistant", "content": answer}]

    def stats(self) -> str:
        """A line on the answers so far."""
        tokens = sum(len(out.tokens[0]) for out, _ in self.done)
        rounds = [count for out, _ in self.done for count in out.rounds[0]]
        seconds = sum(seconds for _, seconds in self.done)
        said = f"answers: {len(self.done)}, tokens: {tokens}"
        if rounds:
            said += f", acceptance length {sum(rounds) / len(rounds):.2f}, {tokens / seconds:.1f} tokens/s"
        positions = self.target.config.max_position_embeddings
        return f"{said}; {len(self.known)} of {positions} positions used"


def run(args: argparse.Namespace) -> int:
    options = decoding.options(args)
    target, draft, tokenizer = decoding.load(args)
    conversation = Conversation(target, draft, tokenizer, options, args.system)
    encode_chat(tokenizer, [{"role": "user", "content": "?"}])  # a template, or an error, at once
    tinted = args.stats and draft is not None and colours(sys.stdout)
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if not obey(conversation, line.strip(), args.stats, tinted):
                break
        return 0
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input edits its line with it)
    note(HELP)
    while (line := ask_line()) is not None:
        try:
            if not obey(conversation, line.strip(), args.stats, tinted):
                break
        except KeyboardInterrupt:
            print()
            note("stopped; Ctrl-D leaves")
        except ValueError as e:
            note(f"error: {e}")
    return 0


def ask_line(prompt: str = "> ") -> str | None:
    """A line of the user's; None at the end of the input. Ctrl-C drops the line."""
    if not sys.stdout.isatty():  # where the answers go must not hold the prompt
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    while True:
        try:
            return input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)", file=sys.stderr)


def obey(conversation: Conversation, line: str, stats: bool, tinted: bool) -> bool:
    """Does what a line says; returns whether the conversation goes on."""
    commands: dict[str, Callable[[], None]] = {
        "/reset": conversation.reset,
        "/stats": lambda: note(conversation.stats()),
        "/help": lambda: note(HELP),
    }
    if line == "/quit":
        return False
    if line in commands:
        commands[line]()
    elif line.startswith("/") and line[1:].isalpha():
        note(f"error: {line} is no command\n{HELP}")
    elif line:
        answer(conversation, line, stats, tinted)
    return True


def answer(conversation: Conversation, message: str, stats: bool, tinted: bool) -> None:
    """Prints the answer on stdout, and on stderr what cut it short."""
    out = conversation.ask(message, decoding.printer(tinted))
    print(flush=True)
    positions = conversation.target.config.max_position_embeddings
    if len(conversation.known) >= positions:
        note(f"the context of {positions} positions is full; /reset begins anew")
    elif out.finish[0] == "length":
        note(f"cut at {len(out.tokens[0])} tokens; see --max-new-tokens")
    if stats:
        decoding.say_stats(out, conversation.done[-1][1], tinted)


def note(text: str) -> None:
    """What is no answer goes to stderr, dim on a terminal."""
    print(f"\x1b[2m{text}\x1b[0m" if colours(sys.stderr) else text, file=sys.stderr, flush=True)
