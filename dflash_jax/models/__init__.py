"""Flax Linen modules. Only this folder imports `flax.linen`; modules declare parameters and call `ops`."""
