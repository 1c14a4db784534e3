"""What the heads' tests share: tiny ones, one of each kind."""

import dataclasses

from fakes import DRAFT

from dflash_jax.config import DraftConfig
from dflash_jax.config.heads import DFlash2, Domino, DSpark, Head

SMALL: dict[str, Head | None] = {
    "plain": None,
    "dflash2": DFlash2(conv_kernel_size=3, conv_group_size=8, selector_rank=4, selector_top_k=5),
    "domino": Domino(emb_dim=6, gru_hidden_dim=10, pure_draft_prefix_len=1, shift_label=True),
    "domino unshifted": Domino(emb_dim=6, gru_hidden_dim=10),
    "dspark": DSpark(markov_rank=4),
}
"""One of each kind, for `fakes.DRAFT`."""


def small_config(name: str) -> DraftConfig:
    return dataclasses.replace(DRAFT, head=SMALL[name])
