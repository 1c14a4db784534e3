"""The DFlash draft: a few Qwen3 layers that read the target's hidden states (arXiv 2602.06036, section 3).

A layer's keys and values are those of the context (the taps of committed tokens, projected once
and kept in the draft's own cache) followed by those of the block [anchor, mask x (Q-1)].
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax import array_typing as at
from dflash_jax.cache import KVCache
from dflash_jax.config import DraftConfig
from dflash_jax.models.heads import HEADS
from dflash_jax.models.heads.seam import Correction, Embed, Pick
from dflash_jax.models.transformer import Embedding, Linear, RMSNorm
from dflash_jax.ops.attention import attention, block_attention
from dflash_jax.ops.mask import block_masks, document_positions, draft_mask
from dflash_jax.ops.rope import rope_table
from dflash_jax.sampling import Proposals
from dflash_jax.sharding import gather_features


class DFlashDraftModel(nn.Module):
    """Maps block embeddings to hidden states; embeddings and output head are the target's, or its own.

    The parameters of the config's draft head, if it has any, lie beside the others, as in checkpoints.

    Attributes:
        remat: Whether `blocks` keeps only the layers' inputs for the backward pass.
    """

    config: DraftConfig
    remat: bool = False

    def setup(self):
        c = self.config
        self.fc = Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        head_type = HEADS[type(c.head)]
        self.layers = [head_type.layer_type(c) for _ in range(c.num_hidden_layers)]
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.own_embedding:
            self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        if c.own_head:
            self.lm_head = Embedding(c.draft_vocab_size or c.vocab_size, c.hidden_size)
        if c.draft_vocab_size is not None:
            # Target id less draft id, as in the checkpoint; `adapters` adds the draft's own id.
            self.param("d2t", lambda _, size: jnp.zeros((size,), jnp.int32), c.draft_vocab_size)
        self.head = head_type(c)
        nn.share_scope(self, self.head)

    def propose(
        self, hidden: at.Hidden, logits: at.Logits, anchor: at.Rows, embed: Embed, pick: Pick
    ) -> Proposals:
        """See `heads.seam.Head.propose`."""
        return self.head.propose(hidden, logits, anchor, embed, pick)

    def forced(self, hidden: at.Hidden, tokens: at.Tokens, embed: Embed) -> Correction | None:
        """See `heads.seam.Head.forced`."""
        return self.head.forced(hidden, tokens, embed)

    def extend(self, context: at.Context, cache: KVCache) -> KVCache:
        """Projects taps `[C * D, B, T]` to every layer's keys and values, at positions `[length, length + T)`.

        The length stays: the caller commits as many of the rows as it keeps.

        Raises:
            ValueError: If a ring has no room for the window and T rows.
        """
        T = context.shape[2]
        self._check_ring(cache, T)
        positions = cache.length[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        return cache.written(self.context_keys_values(context, positions))

    def _check_ring(self, cache: KVCache, count: int) -> None:
        """Raises ValueError if a write of `count` rows would cover positions in a block's window."""
        needed = ring_size(self.config, count)
        if cache.ring is not None and (needed is None or cache.ring < needed):
            raise ValueError(
                f"a write of {count} rows needs more than the ring's {cache.ring} slots"
            )

    def context_keys_values(
        self, context: at.Context, positions: at.Positions
    ) -> list[tuple[at.KeyValues, at.KeyValues]]:
        """Keys and values of the context, a pair a layer."""
        table = rope_table(self.config.rope, self.config.head_dim, positions)
        h = self.hidden_norm(gather_features(self.fc(context)))
        return [layer.self_attn.keys_values(h, table) for layer in self.layers]

    def __call__(self, x: at.Hidden, cache: KVCache) -> tuple[at.Hidden, KVCache]:
        """Hidden states `[D, B, Q]` of block embeddings at positions `[cache.length, cache.length + Q)`.

        Slot k's state, through the head, predicts the token at the anchor's position + k, or + 1 + k
        with `sample_from_anchor`.
        The block's keys and values are left behind the context as scratch; the length is unchanged.
        """
        c = self.config
        Q = x.shape[2]
        positions = cache.length[:, None] + jnp.arange(Q, dtype=jnp.int32)[None]
        table = rope_table(c.rope, c.head_dim, positions)
        self._check_ring(cache, Q)
        held = cache.held(Q)
        masks = {
            see: draft_mask(cache.length, held, Q, *see, c.window_rule) for see in self._layouts()
        }
        written = []
        for i, (layer, see) in enumerate(zip(self.layers, self._layouts())):
            q, k, v = layer.project(x, table)
            written.append(cache.write(i, k, v))
            x = layer.finish(x, attention(q, *written[i], masks[see]))
        k, v = zip(*written)
        return self.norm(x), cache.replace(k=k, v=v)

    def _layouts(self) -> list[tuple[int | None, bool]]:
        """(window, causal) of every layer."""
        c = self.config
        return [(c.window(i), c.causal(i)) for i in range(c.num_hidden_layers)]

    def embed(self, tokens: at.Tokens) -> at.Hidden:
        """Embeddings `[D, B, T]` from the draft's own table."""
        return self.embed_tokens(tokens)

    def logits(self, hidden: at.Hidden) -> at.Logits:
        """Float32 logits `[V, B, T]` of the draft's own head, a row for each id that it can propose."""
        return self.lm_head.logits(hidden)

    def every_parameter(
        self, x: at.Hidden, context: Float[Array, "CD B S"], anchors: Int[Array, "B A"]
    ) -> None:
        """Uses each of them once, for `init`; see `blocks`."""
        c, hidden = self.config, self.blocks(x, context, anchors)
        if c.own_embedding:
            self.embed(anchors)
        if c.own_head:
            self.logits(hidden)
        logits = jnp.zeros((c.draft_vocab_size or c.vocab_size, *hidden.shape[1:]))

        def pick(logits, slot, ids=None):
            return Proposals(jnp.zeros(logits.shape[1:], jnp.int32))

        self.propose(hidden, logits, anchors[:, 0], lambda tokens: x[:, :, :1], pick)

    def blocks(
        self,
        x: at.Hidden,
        context: Float[Array, "CD B S"],
        anchors: Int[Array, "B A"],
        documents: Int[Array, "B S"] | None = None,
    ) -> at.Hidden:
        """Hidden states of many blocks of one sequence at once, for training.

        Block a sees of the context strictly before its anchor and of itself what its layers' rule
        lets it, and nothing of other blocks; equal to `extend` with that context followed by `__call__`.

        Args:
            x: Block embeddings `[D, B, A * Q]`, block after block.
            context: Taps of the whole sequence `[C * D, B, S]`.
            anchors: Index of each block's anchor in its row.
            documents: See `block_masks`; positions are each document's own.

        Returns:
            `[D, B, A * Q]`.
        """
        c = self.config
        B, A = anchors.shape
        Q, S = x.shape[2] // A, context.shape[2]
        if documents is None:
            every, at_anchor = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S)), anchors
        else:
            every = document_positions(documents)
            at_anchor = jnp.take_along_axis(every, anchors, axis=1)
        positions = at_anchor[:, :, None] + jnp.arange(Q, dtype=anchors.dtype)[None, None]
        table = rope_table(c.rope, c.head_dim, positions.reshape(B, -1))
        rows = self.context_keys_values(context, every)
        masks = {
            see: block_masks(anchors, S, Q, *see, c.window_rule, documents)
            for see in self._layouts()
        }

        def through(layer, x, context, masks):
            q, k, v = layer.project(x, table, A)
            return layer.finish(x, block_attention(q, k, v, *context, *masks), A)

        through = nn.remat(through) if self.remat else through
        for layer, context_rows, see in zip(self.layers, rows, self._layouts()):
            x = through(layer, x, context_rows, masks[see])
        return self.norm(x)


def first_slot(config: DraftConfig) -> int:
    """The block slot, 0 or 1, whose hidden state predicts the token behind the anchor."""
    return 0 if config.sample_from_anchor else HEADS[type(config.head)](config).first_slot


def ring_size(config: DraftConfig, write: int) -> int | None:
    """Slots of a ring that keeps an all-sliding draft's window through writes of up to `write` rows.

    A write may leave rows past the committed length, at positions up to `length + write - 1`; each
    covers the one a ring's length before it, which must be out of every block's window. One row is
    written as two (see `cache.write_keys_values`).
    """
    if config.sliding_window is None or not config.slides_everywhere:
        return None
    return config.sliding_window + max(write, 2)
