"""How a draft's hidden states become logits in training: its scaling, its table, and what a draft head adds."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.adapters import shape_logits
from dflash_jax.config import DraftConfig
from dflash_jax.models import apply
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.models.heads import HEADS
from dflash_jax.ops.product import product


class Readout(struct.PyTreeNode):
    """What lies between R hidden states and the draft's logits, beside the product with the head.

    Attributes:
        of_target: The target's head rows of the same ids, for the target's states; None where the draft's
            head is the target's.
        table: A draft head's `seam.Correction`, the rows of the ids that take part; None without a head.
        columns: The correction's columns, one a state.
        candidates: If not 0, the correction is for as many of the likeliest ids of each state alone.
        multiplier, cap: `DraftConfig.output_multiplier` and `final_logit_softcapping`.
    """

    of_target: Float[Array, "V D"] | None = None
    table: Float[Array, "V X"] | None = None
    columns: Float[Array, "X R"] | None = None
    candidates: int = struct.field(pytree_node=False, default=0)
    multiplier: float = struct.field(pytree_node=False, default=1.0)
    cap: float | None = struct.field(pytree_node=False, default=None)

    def logits(self, head: Float[Array, "V D"], hidden: Float[Array, "D c"]) -> Float[Array, "V c"]:
        """Before any correction."""
        return shape_logits(product(head, hidden[:, None]), self.multiplier, self.cap)[:, 0]

    def target_logits(
        self, head: Float[Array, "V D"], hidden: Float[Array, "D c"]
    ) -> Float[Array, "V c"]:
        return _times(head if self.of_target is None else self.of_target, hidden)

    def corrected(
        self, logits: Float[Array, "V c"], columns: Float[Array, "X c"]
    ) -> Float[Array, "V c"]:
        assert self.table is not None
        return logits + _times(self.table, columns)


def _times(table: Float[Array, "V D"], x: Float[Array, "D c"]) -> Float[Array, "V c"]:
    return product(table, x[:, None])[:, 0]


def readout(
    module: DFlashDraftModel,
    params: Any,
    hidden: Float[Array, "D B R"],
    tokens: Int[Array, "B A P"],
    embedding: Float[Array, "V D"],
    ids: Int[Array, " V2"] | None,
) -> Readout:
    """A draft's `Readout` for the hidden states of the slots that predict.

    Args:
        hidden: R = A * P states, block after block.
        tokens: The true token before each prediction, the anchor's first.
        embedding: The target's.
        ids: Which rows of the draft's tables take part; None for all.
    """
    c, (B, A, P) = module.config, tokens.shape

    def embed(tokens):
        return embedding[tokens].transpose(2, 0, 1)

    given = hidden.reshape(-1, B * A, P), tokens.reshape(B * A, P), embed
    correction = apply(module, params, *given, method="forced")
    options = {"multiplier": c.output_multiplier, "cap": c.final_logit_softcapping}
    if correction is None:
        return Readout(**options)
    table, columns = correction
    candidates = HEADS[type(c.head)](c).candidates
    return Readout(
        table=rows_of(table, ids), columns=columns.reshape(len(columns), -1), candidates=candidates, **options
    )  # fmt: skip


def rows_of(table: Float[Array, "V X"], ids: Int[Array, " V2"] | None) -> Float[Array, "V2 X"]:
    """The rows of some ids; all of them for None."""
    return table if ids is None else table[ids]


def head_rows(
    config: DraftConfig,
    params: Any,
    target_head: Float[Array, "V D"],
    ids: Int[Array, " V2"] | None,
) -> tuple[Float[Array, "V2 D"], Float[Array, "V2 D"] | None]:
    """The draft's head rows, and the target's of the same ids where those are others.

    Args:
        target_head: The target's rows of the ids that take part.
        ids: Those ids, as indices into the draft's own head if it has one; None for all.
    """
    if not config.own_head:
        return target_head, None
    return rows_of(params["lm_head"]["weight"], ids), target_head


def selector_loss(
    read: Readout,
    logits: Float[Array, "V c"],
    columns: Float[Array, "X c"],
    token: Int[Array, " c"],
    replace: bool,
) -> tuple[Float[Array, " c"], Bool[Array, " c"], Int[Array, " c"]]:
    """Cross-entropy of a token among a slot's candidates, corrected (DFlash 2).

    Args:
        token: What is to be chosen.
        replace: Lets a token that is no candidate stand for the last one (speculators 0.9.0
            `models/dflash2/metrics.py`); otherwise its loss says nothing (NeMo Automodel
            `components/speculative/dflash/dflash2_core.py`).

    Returns:
        The loss, whether the token is a candidate, and the candidate that decoding would choose.
    """
    assert read.table is not None
    table = read.table
    ids = jax.lax.top_k(jax.lax.stop_gradient(logits).T, read.candidates)[1].T

    def scores(ids):
        fit = jnp.einsum("KcX,Xc->Kc", table[ids].astype(jnp.float32), columns)
        return jnp.take_along_axis(logits, ids, axis=0) + fit

    own, is_token = scores(ids), ids == token[None]
    listed = is_token.any(axis=0)
    chosen = jnp.take_along_axis(ids, jnp.argmax(own, axis=0)[None], axis=0)[0]
    if replace:
        own = own.at[-1].set(jnp.where(listed, own[-1], scores(token[None])[0]))
    index = jnp.where(listed, jnp.argmax(is_token, axis=0), read.candidates - 1)
    loss = optax.softmax_cross_entropy_with_integer_labels(own, index, axis=0)
    return loss, listed, chosen
