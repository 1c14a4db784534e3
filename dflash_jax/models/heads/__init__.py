"""The draft heads: one file each, and this table."""

from dflash_jax.config.heads import DFlash2, Domino, DSpark
from dflash_jax.models.heads.dflash2 import DFlash2Head
from dflash_jax.models.heads.domino import DominoHead
from dflash_jax.models.heads.dspark import DSparkHead
from dflash_jax.models.heads.plain import PlainHead
from dflash_jax.models.heads.seam import Head

HEADS: dict[type, type[Head]] = {
    type(None): PlainHead,
    DFlash2: DFlash2Head,
    Domino: DominoHead,
    DSpark: DSparkHead,
}
"""Of the type of `DraftConfig.head`."""
