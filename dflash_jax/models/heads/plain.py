"""DFlash's own head: the target's, on all slots at once, without parameters."""

from dflash_jax.models.heads.seam import Head


class PlainHead(Head):
    """What every head does that has nothing to add."""
