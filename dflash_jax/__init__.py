"""DFlash speculative decoding in JAX: a block-diffusion draft proposes, the target verifies, nothing is lost."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_jax.generation import Generation, generate, stream
    from dflash_jax.pair import Draft, Target, load_draft, load_target
    from dflash_jax.sampling import Sampling

__version__ = "0.1.0"
__all__ = [
    "Draft",
    "Generation",
    "Sampling",
    "Target",
    "generate",
    "load_draft",
    "load_target",
    "stream",
]
# Imported when they are asked for: the command line's help needs no jax.
_MODULES = {
    "pair": ("Draft", "Target", "load_draft", "load_target"),
    "generation": ("Generation", "generate", "stream"),
    "sampling": ("Sampling",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
