"""Token ids of a prompt, and text of tokens as they come."""

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what a tokenizer makes of bytes that are no whole character yet


def encode(tokenizer: Any, prompt: str, system: str | None = None, raw: bool = False) -> list[int]:
    """Token ids of a prompt, as `generate` takes them.

    Args:
        tokenizer: The target's; see `load_tokenizer`.
        prompt: What the user says.
        system: A system message before it.
        raw: The prompt as it is, to be gone on with: no chat template, no system message.

    Raises:
        ValueError: If the tokenizer has no template.
    """
    if raw:
        return tokenizer.encode(prompt)
    messages = [{"role": "system", "content": system}] if system else []
    return encode_chat(tokenizer, [*messages, {"role": "user", "content": prompt}])


def encode_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation that is to be answered.

    Args:
        tokenizer: The target's; see `load_tokenizer`.
        messages: `{"role": ..., "content": ...}` each, the user's last.

    Raises:
        ValueError: If the tokenizer has no template, or the template refuses these messages.
    """
    if tokenizer.chat_template is None:
        raise ValueError("the target's tokenizer has no chat template: give the prompt raw (--raw)")
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


class Detokenizer:
    """Turns pieces of a token sequence into pieces of its text, which joined are the whole text.

    A token of a byte-level vocabulary may end inside a character: its text is held back until the
    character is whole. Only the tokens since the last piece, and those of that piece, are decoded again.

    Args:
        tokenizer: The target's.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # ids[:start] are done with; the text of ids[start:said] has been given out, and is decoded again
        # before what follows, since a token's text can depend on the one before it.
        self._start = self._said = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain after these further tokens; may be empty."""
        self._ids += ids
        text = self._new_text()
        return "" if text.endswith(_INCOMPLETE) else self._give(text)

    def finish(self) -> str:
        """What was held back; bytes that make no character become U+FFFD."""
        return self._give(self._new_text())

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._said])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]

    def _give(self, text: str) -> str:
        if text:
            self._start, self._said = self._said, len(self._ids)
        return text
