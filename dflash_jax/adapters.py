"""Binds a pair's modules to the functions that the decoder is handed."""

import dataclasses
import functools
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_jax import array_typing as at
from dflash_jax.cache import KVCache, read_rows
from dflash_jax.decode import Models
from dflash_jax.lookup import Combined, Lookup
from dflash_jax.models import apply
from dflash_jax.models.draft import DFlashDraftModel, first_slot
from dflash_jax.models.transformer import Transformer
from dflash_jax.pair import Draft, Target
from dflash_jax.sampling import Picker, Proposals, Verify
from dflash_jax.sharding import keep


@dataclasses.dataclass(frozen=True)
class TargetModel:
    """`decode.TargetFns` of a `Transformer`; `params["target"]` are its parameters."""

    module: Transformer

    def forward(
        self, params: Any, tokens: at.Tokens, cache: KVCache
    ) -> tuple[at.Hidden, at.Context, KVCache]:
        hidden, context, cache = apply(self.module, params["target"], tokens, cache)
        return hidden, context, keep(cache)

    def logits(self, params: Any, hidden: at.Hidden) -> at.Logits:
        return apply(self.module, params["target"], hidden, method="logits")

    def embed(self, params: Any, tokens: at.Tokens) -> at.Hidden:
        return apply(self.module, params["target"], tokens, method="embed")


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """`decode.DraftFns` of a `DFlashDraftModel`, with the target's embedding and head where it has no own.

    `params["draft"]` and `params["target"]` are the two models' parameters.
    """

    module: DFlashDraftModel
    target: TargetModel

    def extend(self, params: Any, context: at.Context, cache: KVCache) -> KVCache:
        context = context.astype(params["draft"]["fc"]["weight"].dtype)
        return keep(apply(self.module, params["draft"], context, cache, method="extend"))

    def propose(
        self, params: Any, text: at.Tokens, cache: KVCache, block_size: int, pick: Picker
    ) -> tuple[Proposals, KVCache]:
        anchor = read_rows(text, pick.anchor, 1)[:, 0]
        hidden, cache = self.block_hidden(params, anchor, cache, block_size)
        embed = functools.partial(self.target.embed, params)
        ids = self.target_ids(params)
        named = pick if ids is None else functools.partial(pick, ids=ids)
        given = hidden, self.logits(params, hidden), anchor, embed, named
        return apply(self.module, params["draft"], *given, method="propose"), cache

    def block_logits(
        self, params: Any, anchor: at.Rows, cache: KVCache, block_size: int
    ) -> tuple[at.Logits, KVCache]:
        """Logits `[V, B, P]`, before any draft head, of the P = `block_size` - 1 tokens behind the anchor."""
        hidden, cache = self.block_hidden(params, anchor, cache, block_size)
        return self.logits(params, hidden), cache

    def block_hidden(
        self, params: Any, anchor: at.Rows, cache: KVCache, block_size: int
    ) -> tuple[at.Hidden, KVCache]:
        """The draft's states `[D, B, P]` of the slots that predict the tokens behind the anchor."""
        c, P = self.module.config, block_size - 1
        # A block of Q - 1 slots is enough where the anchor's own slot predicts too.
        masks = jnp.full((len(anchor), P - c.sample_from_anchor), c.mask_token_id, anchor.dtype)
        x = self.embed(params, jnp.concatenate([anchor[:, None], masks], axis=1))
        hidden, cache = apply(self.module, params["draft"], x, cache)
        first = first_slot(c)
        return hidden[:, :, first : first + P], cache

    def embed(self, params: Any, tokens: at.Tokens) -> at.Hidden:
        """Scaled block embeddings `[D, B, T]` in the draft's dtype."""
        c, dtype = self.module.config, params["draft"]["fc"]["weight"].dtype
        if c.own_embedding:
            x = apply(self.module, params["draft"], tokens, method="embed")
        else:
            x = self.target.embed(params, tokens)
        if c.input_embedding_scale != 1:
            x = x.astype(jnp.float32) * c.input_embedding_scale
        return x.astype(dtype)

    def logits(self, params: Any, hidden: at.Hidden) -> at.Logits:
        """Float32 logits of the draft's hidden states, a row for each id that it can propose."""
        c = self.module.config
        if c.own_head:
            logits = apply(self.module, params["draft"], hidden, method="logits")
        else:
            dtype = params["target"]["norm"]["weight"].dtype  # a head may be of integers
            logits = self.target.logits(params, hidden.astype(dtype))
        return shape_logits(logits, c.output_multiplier, c.final_logit_softcapping)

    def target_ids(self, params: Any) -> Int[Array, " V"] | None:
        """The target's id of each row of a reduced vocabulary's head; None for the whole vocabulary."""
        if self.module.config.draft_vocab_size is None:
            return None
        offset = params["draft"]["d2t"]
        return offset + jnp.arange(len(offset), dtype=offset.dtype)


def shape_logits(logits: at.Logits, multiplier: float, cap: float | None) -> at.Logits:
    """A draft's `output_multiplier`, then its softcap.

    Source: dflash 0.1.0 `DFlashDraftModel.compute_logits`.
    """
    if multiplier != 1:
        logits = logits * multiplier
    return logits if cap is None else cap * jnp.tanh(logits / cap)


LOOKUP_BLOCK_SIZE = 8  # of lookup alone, where the caller does not say


def bind(
    target: Target,
    draft: Draft | Literal["lookup"] | None,
    block_size: int | None = None,
    verify: Verify = "coupled",
    lookup: bool = False,
    adapt_width: bool = False,
) -> tuple[Models, dict[str, Any]]:
    """The decoder's models and parameters of a pair; a block of one leaves nothing to draft.

    Args:
        draft: "lookup" drafts from the text alone, without a model.
        lookup: Lets what the text itself suggests take the place of the draft's proposals.
        adapt_width: Drafts and reads smaller blocks, or none, while few proposals are accepted.

    Raises:
        ValueError: If `block_size` is not in [1, what the draft was trained for], which is one more
            than its own block where slot 0 is a proposal too; lookup alone has no upper bound.
    """
    if lookup and not isinstance(draft, Draft):
        raise ValueError(f"lookup=True goes with a draft model, not with draft={draft!r}")
    plain = TargetModel(Transformer(target.config))
    if isinstance(draft, str):
        if draft != "lookup":
            raise ValueError(f"{draft=} must be a draft, None or 'lookup'")
        block_size = LOOKUP_BLOCK_SIZE if block_size is None else block_size
        if block_size > 1:
            widths = block_widths(block_size, adapt_width)
            return Models(plain, Lookup(), block_size, verify, widths), {"target": target.params}
        draft = None
    trained = 1 if draft is None else draft.config.max_proposals + 1
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
    widths = block_widths(block_size, adapt_width)
    params = {"target": target.params, "draft": draft.params}
    return Models(model, fns, block_size, verify, widths), params


def block_widths(block_size: int, adapt: bool) -> tuple[int, ...]:
    """Powers of two from 1 on, and the block size; none without adaptation."""
    powers = [1 << i for i in range(block_size.bit_length()) if 1 << i < block_size]
    return (*powers, block_size) if adapt else ()
