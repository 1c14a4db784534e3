"""DFlash's own head: the target's, on all slots at once."""

from dflash_jax import array_typing as at
from dflash_jax.models.heads.seam import Embed, Head, Pick
from dflash_jax.sampling import Proposals


class PlainHead(Head):
    """No parameters; no proposal depends on another."""

    def propose(
        self, hidden: at.Hidden, logits: at.Logits, anchor: at.Rows, embed: Embed, pick: Pick
    ) -> Proposals:
        return pick(logits, 1)
