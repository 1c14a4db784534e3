"""Binds a pair's modules to the functions that the decoder is handed."""

import dataclasses
import functools
from typing import Any, Literal

import jax.numpy as jnp

from dflash_jax import array_typing as at
from dflash_jax.cache import KVCache, read_rows
from dflash_jax.decode import Models
from dflash_jax.lookup import Combined, Lookup
from dflash_jax.models import apply
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.models.heads import HEADS
from dflash_jax.models.transformer import Transformer
from dflash_jax.pair import Draft, Target
from dflash_jax.sampling import Picker, Proposals, Verify


@dataclasses.dataclass(frozen=True)
class TargetModel:
    """`decode.TargetFns` of a `Transformer`; `params["target"]` are its parameters."""

    module: Transformer

    def forward(
        self, params: Any, tokens: at.Tokens, cache: KVCache
    ) -> tuple[at.Hidden, at.Context, KVCache]:
        return apply(self.module, params["target"], tokens, cache)

    def logits(self, params: Any, hidden: at.Hidden) -> at.Logits:
        return apply(self.module, params["target"], hidden, method="logits")

    def embed(self, params: Any, tokens: at.Tokens) -> at.Hidden:
        return apply(self.module, params["target"], tokens, method="embed")


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """`decode.DraftFns` of a `DFlashDraftModel`, with the target's embedding and head.

    `params["draft"]` and `params["target"]` are the two models' parameters.
    """

    module: DFlashDraftModel
    target: TargetModel

    def extend(self, params: Any, context: at.Context, cache: KVCache) -> KVCache:
        context = context.astype(params["draft"]["fc"]["weight"].dtype)
        return apply(self.module, params["draft"], context, cache, method="extend")

    def propose(
        self, params: Any, text: at.Tokens, cache: KVCache, block_size: int, pick: Picker
    ) -> tuple[Proposals, KVCache]:
        anchor = read_rows(text, pick.anchor, 1)[:, 0]
        hidden, cache = self.block_hidden(params, anchor, cache, block_size)
        embed = functools.partial(self.target.embed, params)
        given = hidden, self.head_logits(params, hidden), anchor, embed, pick
        return apply(self.module, params["draft"], *given, method="propose"), cache

    def block_logits(
        self, params: Any, anchor: at.Rows, cache: KVCache, block_size: int
    ) -> tuple[at.Logits, KVCache]:
        """Logits `[V, B, P]`, before any draft head, of the tokens behind the anchor."""
        hidden, cache = self.block_hidden(params, anchor, cache, block_size)
        return self.head_logits(params, hidden), cache

    def head_logits(self, params: Any, hidden: at.Hidden) -> at.Logits:
        """The target's head on the draft's states."""
        hidden = hidden.astype(params["target"]["embed_tokens"]["weight"].dtype)
        return self.target.logits(params, hidden)

    def block_hidden(
        self, params: Any, anchor: at.Rows, cache: KVCache, block_size: int
    ) -> tuple[at.Hidden, KVCache]:
        """The draft's states `[D, B, P]` of the slots that predict the tokens behind the anchor."""
        config = self.module.config
        masks = jnp.full((len(anchor), block_size - 1), config.mask_token_id, anchor.dtype)
        x = self.target.embed(params, jnp.concatenate([anchor[:, None], masks], axis=1))
        x = x.astype(params["draft"]["fc"]["weight"].dtype)
        hidden, cache = apply(self.module, params["draft"], x, cache)
        first = HEADS[type(config.head)](config).first_slot
        return hidden[:, :, first : first + block_size - 1], cache


LOOKUP_BLOCK_SIZE = 8  # of lookup alone, where the caller does not say


def bind(
    target: Target,
    draft: Draft | Literal["lookup"] | None,
    block_size: int | None = None,
    verify: Verify = "coupled",
    lookup: bool = False,
) -> tuple[Models, dict[str, Any]]:
    """The decoder's models and parameters of a pair; a block of one leaves nothing to draft.

    Args:
        draft: "lookup" drafts from the text alone, without a model.
        lookup: Lets what the text itself suggests take the place of the draft's proposals.

    Raises:
        ValueError: If `block_size` is not in [1, the draft's trained block size]; lookup alone has no
            upper bound.
    """
    if lookup and not isinstance(draft, Draft):
        raise ValueError(f"lookup=True goes with a draft model, not with draft={draft!r}")
    plain = TargetModel(Transformer(target.config))
    if isinstance(draft, str):
        if draft != "lookup":
            raise ValueError(f"{draft=} must be a draft, None or 'lookup'")
        block_size = LOOKUP_BLOCK_SIZE if block_size is None else block_size
        if block_size > 1:
            return Models(plain, Lookup(), block_size, verify), {"target": target.params}
        draft = None
    trained = 1 if draft is None else draft.config.block_size
    block_size = trained if block_size is None else block_size
    if not 1 <= block_size <= trained:
        why = "without a draft" if draft is None else "the draft's trained block size"
        raise ValueError(f"{block_size=} must be in [1, {trained}], {why}")
    if draft is None or block_size == 1:
        return Models(plain, None, 1), {"target": target.params}
    c = draft.config
    model = TargetModel(Transformer(target.config, c.target_layer_ids, c.last_tap))
    own = DraftModel(DFlashDraftModel(c), model)
    fns = Combined(own) if lookup else own
    return Models(model, fns, block_size, verify), {"target": target.params, "draft": draft.params}
