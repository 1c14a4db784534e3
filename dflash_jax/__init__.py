"""DFlash speculative decoding in JAX: a block-diffusion draft proposes, the target verifies, nothing is lost."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_jax.generation import Generation, generate, stream
    from dflash_jax.pair import Draft, Target, load_draft, load_target, load_tokenizer
    from dflash_jax.sampling import Sampling
    from dflash_jax.text import Detokenizer, encode, encode_chat

__version__ = "0.1.0"
__all__ = [
    "Detokenizer",
    "Draft",
    "Generation",
    "Sampling",
    "Target",
    "encode",
    "encode_chat",
    "generate",
    "load_draft",
    "load_target",
    "load_tokenizer",
    "stream",
]
# Imported when they are asked for: the command line's help needs no jax.
_MODULES = {
    "pair": ("Draft", "Target", "load_draft", "load_target", "load_tokenizer"),
    "generation": ("Generation", "generate", "stream"),
    "sampling": ("Sampling",),
    "text": ("Detokenizer", "encode", "encode_chat"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
