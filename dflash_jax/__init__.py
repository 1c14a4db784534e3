"""DFlash speculative decoding in JAX: a block-diffusion draft proposes, the target verifies, nothing is lost."""

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
