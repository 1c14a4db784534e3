"""DFlash 2: convolutions around every sublayer, and a walk over each slot's likeliest candidates.

Source: dflash 0.1.0 `DFlash2DraftModel`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax import array_typing as at
from dflash_jax.config import DraftConfig, TransformerConfig
from dflash_jax.config.heads import DFlash2
from dflash_jax.models.heads.seam import (
    Correction,
    DFlashDecoderLayer,
    Embed,
    Head,
    Matrix,
    Pick,
    column,
    walk,
)
from dflash_jax.ops.product import product
from dflash_jax.sampling import Proposals

BEFORE, AFTER = 0, 1  # the sublayer


def settings(config: TransformerConfig) -> DFlash2:
    assert isinstance(config, DraftConfig)
    assert isinstance(config.head, DFlash2)
    return config.head


def identity(key, shape, dtype=jnp.float32):
    """Base kernels that pass a slot's own value on; trainers start there."""
    return jnp.zeros(shape, dtype).at[:, 0].set(1)


class Convolution(nn.Module):
    """Short causal filters over a block's slots, whose taps depend on the sublayer's input."""

    config: TransformerConfig

    def setup(self):
        h, D = settings(self.config), self.config.hidden_size
        taps = h.conv_kernel_size
        self.base_kernel = self.param("base_kernel", identity, (2, taps, D))
        self.kernel_projection = Matrix(
            (2 * taps * (D // h.conv_group_size), D), nn.initializers.zeros
        )

    def __call__(self, side: int, x: at.Hidden, u: at.Hidden, blocks: int) -> at.Hidden:
        """Filters `x` with the coefficients of side `side` that `u` gives.

        Args:
            x: The sublayer's input or output, `[D, B, T]`.
            u: The sublayer's normed input, `[D, B, T]`.
            blocks: Blocks on the T axis, one behind the other; none sees another.
        """
        taps = settings(self.config).conv_kernel_size
        base = self.base_kernel[side]
        kernels = product(self.kernel_projection.weight, u)
        kernels = kernels.reshape(2, taps, -1, *u.shape[1:])[side]
        groups, (B, T) = kernels.shape[1], u.shape[1:]
        values = x.astype(jnp.float32).reshape(groups, -1, B, blocks, T // blocks)
        total = jnp.zeros_like(values)
        for k in range(taps):
            tap = base[k].astype(jnp.float32).reshape(groups, -1, 1, 1, 1)
            tap = tap + kernels[k].reshape(groups, 1, B, blocks, -1)
            # The value k slots earlier; before the block there is nothing.
            earlier = jnp.pad(values, ((0, 0),) * 4 + ((k, 0),))[..., : values.shape[-1]]
            total = total + tap * earlier
        return total.reshape(x.shape).astype(x.dtype)


class DFlash2DecoderLayer(DFlashDecoderLayer):
    """A layer with filters before and after its attention and its MLP; context rows go through none."""

    def setup(self):
        super().setup()
        self.attention_conv = Convolution(self.config)
        self.mlp_conv = Convolution(self.config)

    def project(
        self, x: at.Hidden, table: at.RopeTable, blocks: int = 1
    ) -> tuple[at.Queries, at.KeyValues, at.KeyValues]:
        u = self.input_layernorm(x)
        h = self.attention_conv(BEFORE, u, u, blocks)
        return self.self_attn.queries(h, table), *self.self_attn.keys_values(h, table)

    def finish(self, x: at.Hidden, attended: Float[Array, "NH B T"], blocks: int = 1) -> at.Hidden:
        u, out = self.input_layernorm(x), self.self_attn.o_proj(attended)
        x = x + self.attention_conv(AFTER, out, u, blocks)
        u = self.post_attention_layernorm(x)
        out = self.mlp(self.mlp_conv(BEFORE, u, u, blocks))
        return x + self.mlp_conv(AFTER, out, u, blocks)


class CandidateSelector(nn.Module):
    """Codebooks of the tokens before and after a seam, and the hidden state's say on how they fit."""

    config: DraftConfig

    def setup(self):
        shape = self.config.vocab_size, settings(self.config).selector_rank
        # A fresh selector leaves the order of the candidates alone, as NeMo Automodel's does.
        self.predecessor_codebook = self.param(
            "predecessor_codebook", nn.initializers.normal(0.02), shape
        )
        self.successor_codebook = self.param("successor_codebook", nn.initializers.zeros, shape)
        self.hidden_projection = Matrix((shape[1], self.config.hidden_size))


class DFlash2Head(Head):
    """From left to right: a candidate's logit, plus how well it follows the token before."""

    layer_type = DFlash2DecoderLayer

    def setup(self):
        self.candidate_selector = CandidateSelector(self.config)

    def propose(
        self, hidden: at.Hidden, logits: at.Logits, anchor: at.Rows, embed: Embed, pick: Pick
    ) -> Proposals:
        selector = self.candidate_selector
        # Largest first, the lower id first among equals.
        unary, ids = jax.lax.top_k(logits.transpose(1, 2, 0), settings(self.config).selector_top_k)
        after = selector.successor_codebook[ids].transpose(2, 3, 0, 1)  # [K, R, B, P]
        unary, ids = unary.transpose(2, 0, 1), ids.transpose(2, 0, 1)
        gate = product(selector.hidden_projection.weight, hidden)
        after = after.astype(jnp.float32) * gate[None]
        before = selector.predecessor_codebook

        def step(carry, previous, i):
            fits = jax.lax.dynamic_index_in_dim(after, i, axis=3, keepdims=False)
            fit = jnp.sum(fits * before[previous].T.astype(jnp.float32)[None], axis=1)
            return pick(column(unary, i) + fit[:, :, None], i + 1, column(ids, i)), carry

        return walk(step, None, anchor, logits.shape[2])

    def forced(self, hidden: at.Hidden, tokens: at.Tokens, embed: Embed) -> Correction:
        selector = self.candidate_selector
        gate = product(selector.hidden_projection.weight, hidden)
        before = selector.predecessor_codebook[tokens].transpose(2, 0, 1)
        return Correction(selector.successor_codebook, gate * before.astype(jnp.float32))

    @property
    def candidates(self) -> int:
        return settings(self.config).selector_top_k
