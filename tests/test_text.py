import pytest

from dflash_jax.text import Detokenizer


class Bytes:
    """A tokenizer of single bytes: every character beyond ASCII is cut."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


TEXTS = ["plain", "naïve café", "日本 🏔️ ok", "é", ""]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_pieces_hold_whole_characters_and_join_to_the_text(text, size):
    ids, words = list(text.encode()), Detokenizer(Bytes())
    pieces = [words.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + words.finish() == text


def test_bytes_that_make_no_character_come_at_the_end():
    words = Detokenizer(Bytes())
    assert words.push("é".encode()[:1]) == ""
    assert words.finish() == "\ufffd"


def test_text_comes_as_soon_as_it_is_whole():
    words = Detokenizer(Bytes())
    assert [words.push([b]) for b in "aé!".encode()] == ["a", "", "é", "!"]
