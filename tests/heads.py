"""What the heads' tests share: golden drafts with heads, and tiny ones."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
from fakes import DRAFT
from safetensors.numpy import load_file

from dflash_jax.checkpoint import hf, keys
from dflash_jax.config import DraftConfig
from dflash_jax.config.heads import DFlash2, Domino, DSpark, Head
from dflash_jax.pair import Draft, Target, load_target, read_draft_config

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


@dataclasses.dataclass(frozen=True)
class HeadCase:
    target: Target
    draft: Draft
    expected: dict[str, np.ndarray]
    info: dict

    def close(self, actual, expected, kind):
        np.testing.assert_allclose(actual, expected, **self.info["tolerances"][kind])


@functools.cache
def load_head_case(golden, name: str) -> HeadCase:
    folder = golden / "drafts" / name
    info = json.loads((folder / "case.json").read_text())
    config = read_draft_config(folder)
    params = keys.assemble(
        hf.read_tensors(folder), keys.expected_shapes(config), folder, jnp.float32
    )
    target = load_target(golden / info["target"], dtype=jnp.float32)
    draft = Draft(config, params, source=folder)
    return HeadCase(target, draft, load_file(folder / "expected.safetensors"), info)
