"""The DFlash draft: a few Qwen3 layers that read the target's hidden states (arXiv 2602.06036, section 3).

A layer's keys and values are those of the context (the taps of committed tokens, projected once
and kept in the draft's own cache) followed by those of the block [anchor, mask x (Q-1)].
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax import array_typing as at
from dflash_jax.cache import KVCache, write_keys_values
from dflash_jax.config import DraftConfig
from dflash_jax.models.heads import HEADS
from dflash_jax.models.heads.seam import Embed, Pick
from dflash_jax.models.transformer import Linear, RMSNorm
from dflash_jax.ops.attention import attention, block_attention
from dflash_jax.ops.mask import block_mask
from dflash_jax.ops.rope import rope_table
from dflash_jax.sampling import Proposals


class DFlashDraftModel(nn.Module):
    """Embeddings and output head are the target's: the model maps block embeddings to hidden states.

    The parameters of the config's draft head, if it has any, lie beside the others, as in checkpoints.
    """

    config: DraftConfig

    def setup(self):
        c = self.config
        self.fc = Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        head_type = HEADS[type(c.head)]
        self.layers = [head_type.layer_type(c) for _ in range(c.num_hidden_layers)]
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = head_type(c)
        nn.share_scope(self, self.head)

    def every_parameter(
        self, x: at.Hidden, context: Float[Array, "CD B S"], anchors: Int[Array, "B A"]
    ) -> None:
        """Uses each of them once, for `init`; see `blocks`."""
        hidden = self.blocks(x, context, anchors)
        logits = jnp.zeros((self.config.vocab_size, *hidden.shape[1:]))

        def pick(logits, slot, ids=None):
            return Proposals(jnp.zeros(logits.shape[1:], jnp.int32))

        self.propose(hidden, logits, anchors[:, 0], lambda tokens: x[:, :, :1], pick)

    def propose(
        self, hidden: at.Hidden, logits: at.Logits, anchor: at.Rows, embed: Embed, pick: Pick
    ) -> Proposals:
        """See `heads.seam.Head.propose`."""
        return self.head.propose(hidden, logits, anchor, embed, pick)

    def extend(self, context: at.Context, cache: KVCache) -> KVCache:
        """Projects taps `[C * D, B, T]` to every layer's keys and values, at slots `[length, length + T)`.

        The length stays: the caller commits as many of the rows as it keeps.
        """
        positions = cache.length[:, None] + jnp.arange(context.shape[2], dtype=jnp.int32)[None]
        rows = self.context_keys_values(context, positions)
        keys = [write_keys_values(buffer, k, cache.length) for buffer, (k, _) in zip(cache.k, rows)]
        values = [
            write_keys_values(buffer, v, cache.length) for buffer, (_, v) in zip(cache.v, rows)
        ]
        return cache.replace(k=tuple(keys), v=tuple(values))

    def context_keys_values(
        self, context: at.Context, positions: at.Positions
    ) -> list[tuple[at.KeyValues, at.KeyValues]]:
        """Keys and values of the context, a pair a layer."""
        table = rope_table(self.config.rope, self.config.head_dim, positions)
        h = self.hidden_norm(self.fc(context))
        return [layer.self_attn.keys_values(h, table) for layer in self.layers]

    def __call__(self, x: at.Hidden, cache: KVCache) -> tuple[at.Hidden, KVCache]:
        """Hidden states `[D, B, Q]` of block embeddings at positions `[cache.length, cache.length + Q)`.

        Slot k's state, through the target's head, predicts the token at the anchor's position + k.
        The block's keys and values are left behind the context as scratch; the length is unchanged.
        """
        c = self.config
        Q = x.shape[2]
        positions = cache.length[:, None] + jnp.arange(Q, dtype=jnp.int32)[None]
        table = rope_table(c.rope, c.head_dim, positions)
        mask = block_mask(cache.length, Q, cache.size)
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            q, k, v = layer.project(x, table)
            keys.append(write_keys_values(cache.k[i], k, cache.length))
            values.append(write_keys_values(cache.v[i], v, cache.length))
            x = layer.finish(x, attention(q, keys[i], values[i], mask))
        return self.norm(x), cache.replace(k=tuple(keys), v=tuple(values))

    def blocks(
        self, x: at.Hidden, context: Float[Array, "CD B S"], anchors: Int[Array, "B A"]
    ) -> at.Hidden:
        """Hidden states of many blocks of one sequence at once, for training.

        Block a sees the context strictly before its anchor and itself, nothing of other blocks;
        equal to `extend` with that context followed by `__call__`.

        Args:
            x: Block embeddings `[D, B, A * Q]`, block after block.
            context: Taps of the whole sequence `[C * D, B, S]`, positions 0..S-1.
            anchors: Position of each block's anchor.

        Returns:
            `[D, B, A * Q]`.
        """
        c = self.config
        A = anchors.shape[1]
        Q = x.shape[2] // A
        positions = (anchors[:, :, None] + jnp.arange(Q, dtype=anchors.dtype)[None, None]).reshape(
            len(anchors), -1
        )
        table = rope_table(c.rope, c.head_dim, positions)
        every = jnp.broadcast_to(
            jnp.arange(context.shape[2], dtype=jnp.int32), (len(anchors), context.shape[2])
        )
        rows = self.context_keys_values(context, every)
        for layer, (ctx_k, ctx_v) in zip(self.layers, rows):
            q, k, v = layer.project(x, table, A)
            x = layer.finish(x, block_attention(q, k, v, ctx_k, ctx_v, anchors), A)
        return self.norm(x)
