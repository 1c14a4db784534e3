"""The commands' options and examples. Imports nothing slow."""

import argparse

from dflash_jax.command import examples

QUANTIZE = ("int8",)  # of `checkpoint.quantization`, which imports jax
VERIFY = ("coupled", "rejection", "rejection_argmax")  # of `sampling`, which imports jax
SHELLS = ("bash", "zsh", "fish")
EXAMPLES = {
    "": """
        dflash-jax generate "Why is the sky blue?" --stats
        dflash-jax chat
        dflash-jax generate --help
    """,
    "generate": """
        dflash-jax generate "Write a haiku about rain." --block-size 4 --stats
        dflash-jax generate "Tell me a joke." --temperature 0.7 --top-p 0.9 --seed 3
        dflash-jax generate "def fib(n):" --raw --draft lookup --json
        dflash-jax generate "Why?" --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16
    """,
    "chat": """
        dflash-jax chat --block-size 4 --stats
        dflash-jax chat --system "Answer in one sentence." --temperature 0.7
        printf 'My name is Ada.\\nWhat is my name?\\n' | dflash-jax chat
    """,
    "bench": """
        dflash-jax bench --block-size 4 --limit 8
        dflash-jax bench --prompts humaneval --draft lookup --json
        dflash-jax bench --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16
    """,
    "inspect": """
        dflash-jax inspect z-lab/Qwen3-4B-DFlash-b16 --target Qwen/Qwen3-4B
        dflash-jax inspect path/to/folder --json
    """,
    "completion": """
        dflash-jax completion bash > ~/.local/share/bash-completion/completions/dflash-jax
        dflash-jax completion zsh > ~/.zfunc/_dflash-jax
        dflash-jax completion fish > ~/.config/fish/completions/dflash-jax.fish
    """,
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; `command` of its result is a module of this package."""
    parser = argparse.ArgumentParser(
        prog="dflash-jax",
        description="DFlash speculative decoding in JAX.",
        **examples(EXAMPLES[""]),
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def add(name: str, summary: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.",
            parents=[*parents, _common()], **examples(EXAMPLES[name]),
        )  # fmt: skip

    generate = add("generate", "answer a prompt", _pair(128), _talk(), _json())
    generate.add_argument("prompt", metavar="PROMPT")
    generate.add_argument(
        "--raw", action="store_true", help="the prompt as it is, without the chat template"
    )
    add("chat", "talk, with what was said before in mind", _pair(512), _talk())
    bench = add(
        "bench",
        "measure plain decoding against DFlash, and acceptance by context length",
        _pair(128),
        _json(),
    )
    bench.add_argument(
        "--prompts",
        default="held_out",
        metavar="SET",
        help="held_out, humaneval, gsm8k, mtbench, or a JSON-lines file (default: held_out)",
    )
    bench.add_argument("--limit", type=int, metavar="N", help="the first N prompts only")
    inspect = add(
        "inspect",
        "what a checkpoint is, and everything wrong with it; status 1 for an error",
        _json(),
    )
    inspect.add_argument("ref", metavar="REF", help="hub id, folder, Orbax folder or GGUF file")
    inspect.add_argument("--target", metavar="REF", help="judge a draft as this target's")
    completion = add("completion", "print a script that completes commands and options")
    completion.add_argument("shell", choices=SHELLS)
    return parser


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--no-color", action="store_true", help="no colours on a terminal; as does NO_COLOR=1"
    )
    return common


def _json() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _talk() -> argparse.ArgumentParser:
    """Options of the commands that answer."""
    talk = argparse.ArgumentParser(add_help=False)
    talk.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    talk.add_argument(
        "--stats",
        action="store_true",
        help="acceptance and speed, on stderr; on a terminal the drafted and accepted text is green",
    )
    return talk


def _pair(max_new_tokens: int) -> argparse.ArgumentParser:
    """Options of every command that decodes."""
    pair = argparse.ArgumentParser(add_help=False)
    pair.add_argument(
        "--target",
        metavar="REF",
        help="hub id, folder, Orbax folder or GGUF file (default: the embedded SmolLM2-135M-Instruct)",
    )
    pair.add_argument(
        "--draft",
        metavar="REF",
        help="hub id or folder; lookup to draft from the text itself; none for plain decoding "
        "(default: the embedded draft)",
    )
    pair.add_argument(
        "--lookup",
        action="store_true",
        help="where the text's last tokens recur in it, propose what followed instead of the draft's",
    )
    pair.add_argument(
        "--adapt-width",
        action="store_true",
        help="draft and read smaller blocks while few proposals are accepted",
    )
    pair.add_argument(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help=f"most tokens of an answer (default: {max_new_tokens})",
    )
    pair.add_argument(
        "--block-size",
        type=int,
        metavar="Q",
        help="the anchor and Q - 1 proposals (default: the draft's)",
    )
    pair.add_argument(
        "--target-layer-ids",
        metavar="IDS",
        help='taps of a draft whose config lacks them: "1,9,17" or "default"',
    )
    pair.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="default: float32 on the CPU, else bfloat16",
    )
    pair.add_argument(
        "--quantize",
        choices=QUANTIZE,
        help="hold the target's matrices as integers of 8 bits; its answers are then the quantised target's",
    )
    _add_sampling(pair)
    return pair


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps all ids")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 keeps all ids")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--verify", choices=VERIFY, default="coupled", help="how proposals are judged (coupled)"
    )
