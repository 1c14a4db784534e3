"""Flax Linen modules. Only this folder imports `flax.linen`; modules declare parameters and call `ops`."""

from typing import Any

import flax.linen as nn

from dflash_jax import array_typing as at


def apply(module: nn.Module, params: at.Params, *args: Any, method: str = "__call__") -> Any:
    """`module`'s method as a pure function of its parameters."""
    return module.apply({"params": params}, *args, method=method)
