"""Draws an answer of the embedded pair, drafted tokens tinted, as `docs/images/answer.svg`.

python -m benchmarks.picture ["PROMPT"]
"""

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from dflash_jax.cli.decoding import speak
from dflash_jax.generation import stream
from dflash_jax.pair import load_draft, load_target, load_tokenizer
from dflash_jax.text import Detokenizer, encode

PROMPT = "Write a Python function that checks whether a word is a palindrome."
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "answer.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--block-size", type=int, default=4)
    args = parser.parse_args()
    target = load_target()
    draft, tokenizer = load_draft(None, target), load_tokenizer(target)
    said = Text()

    def write(text: str, drafted: bool) -> None:
        said.append(text, "on #1f6f43" if drafted else "")

    pieces = stream(
        target,
        draft,
        encode(tokenizer, args.prompt),
        max_new_tokens=256,
        block_size=args.block_size,
    )
    out = speak(
        pieces,
        Detokenizer(tokenizer),
        target.stop_token_ids,
        write,
    )
    rounds = out.rounds[0]
    console = Console(record=True, width=88, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"> {args.prompt}\n", "bold"))
    console.print(said)
    console.print(
        Text(
            f"\n{sum(rounds)} tokens in {len(rounds)} passes of the target; tinted: drafted and accepted",
            "italic",
        )
    )
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    svg = console.export_svg(title="dflash-jax generate --stats", theme=MONOKAI)
    # The reader's own monospaced font: nothing is fetched from elsewhere.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
