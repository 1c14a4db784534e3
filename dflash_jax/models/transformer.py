"""The target: Qwen3, Qwen3-MoE or Llama, returning the hidden states that the draft reads.

Parameters are one nested dict under Hugging Face's names and shapes:
`params["layers_0"]["self_attn"]["q_proj"]["weight"]` is `[out, in]`, as in the checkpoint.
Activations are feature-major, `[D, B, T]`; modules compute in the dtype of the parameters given.
A quantised matrix has integers as its `weight` and a `scale` `[out]` beside it, in that dtype.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from dflash_jax import array_typing as at
from dflash_jax.cache import KVCache, write_keys_values
from dflash_jax.config import MoeConfig, TargetConfig, TransformerConfig
from dflash_jax.models.moe import SparseMLP
from dflash_jax.ops.attention import attention
from dflash_jax.ops.mask import causal_mask
from dflash_jax.ops.norm import rms_norm
from dflash_jax.ops.product import product, quantized_product
from dflash_jax.ops.rope import apply_rotary_pos_emb, rope_table


def _scale(module: nn.Module) -> Float[Array, " F"] | None:
    """The scale of a module's matrix, if that is quantised."""
    return module.get_variable("params", "scale")


def _times(
    weight: Shaped[Array, "F D"], scale: Float[Array, " F"] | None, x: at.Hidden
) -> Float[Array, "F B T"]:
    return product(weight, x) if scale is None else quantized_product(weight, scale, x)


class Linear(nn.Module):
    """y = W x + b on the leading axis, with W as the left operand."""

    in_features: int
    out_features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
        weight = self.param("weight", init, (self.out_features, self.in_features))
        y = _times(weight, _scale(self), x).astype(x.dtype)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.out_features,))[:, None, None]
        return y


class RMSNorm(nn.Module):
    features: int
    eps: float
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        return rms_norm(
            x, self.param("weight", nn.initializers.ones, (self.features,)), self.eps, self.axis
        )


class Attention(nn.Module):
    """Projections of one attention layer; who attends to what is the caller's business."""

    config: TransformerConfig

    def setup(self):
        c = self.config
        width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, width, c.attention_bias)
        self.k_proj = Linear(c.hidden_size, kv_width, c.attention_bias)
        self.v_proj = Linear(c.hidden_size, kv_width, c.attention_bias)
        self.o_proj = Linear(width, c.hidden_size, c.attention_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, axis=1)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, axis=1)

    def queries(self, x: at.Hidden, table: at.RopeTable) -> at.Queries:
        """Normed, rotated queries."""
        q = self.q_proj(x)
        q = q.reshape(-1, self.config.head_dim, *q.shape[1:])
        return apply_rotary_pos_emb(self.q_norm(q) if self.config.qk_norm else q, table)

    def keys_values(self, x: at.Hidden, table: at.RopeTable) -> tuple[at.KeyValues, at.KeyValues]:
        """Normed, rotated keys, and values, in the cache's layout."""
        k, v = self.k_proj(x), self.v_proj(x)
        k, v = (y.reshape(-1, self.config.head_dim, *y.shape[1:]) for y in (k, v))
        k = apply_rotary_pos_emb(self.k_norm(k) if self.config.qk_norm else k, table)
        return k.transpose(2, 0, 3, 1), v.transpose(2, 0, 3, 1)


class MLP(nn.Module):
    config: TransformerConfig

    def setup(self):
        c = self.config
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, c.mlp_bias)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, c.mlp_bias)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, c.mlp_bias)

    def __call__(self, x: at.Hidden) -> at.Hidden:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One pre-norm layer, in two halves around the attention that the caller computes.

    Attributes:
        moe: The mixture that stands for the MLP, if the layer is sparse.
    """

    config: TransformerConfig
    attention_type: type[Attention] = Attention
    moe: MoeConfig | None = None

    def setup(self):
        c = self.config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = self.attention_type(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c) if self.moe is None else SparseMLP(self.moe, c.hidden_size)

    def project(
        self, x: at.Hidden, table: at.RopeTable
    ) -> tuple[at.Queries, at.KeyValues, at.KeyValues]:
        h = self.input_layernorm(x)
        return self.self_attn.queries(h, table), *self.self_attn.keys_values(h, table)

    def finish(self, x: at.Hidden, attended: Float[Array, "NH B T"]) -> at.Hidden:
        x = x + self.self_attn.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))

    @nn.jit  # layers of one kind are traced and lowered once; XLA inlines them
    def __call__(
        self,
        x: at.Hidden,
        table: at.RopeTable,
        k: at.KeyValues,
        v: at.KeyValues,
        length: at.Rows,
        mask: at.Mask,
    ) -> tuple[at.Hidden, at.KeyValues, at.KeyValues]:
        """The layer over a cache's keys and values, which come back with T rows written at `length`."""
        q, new_k, new_v = self.project(x, table)
        k, v = write_keys_values(k, new_k, length), write_keys_values(v, new_v, length)
        return self.finish(x, attention(q, k, v, mask)), k, v


class Embedding(nn.Module):
    """The token table `[V, D]`, also the head's weight when tied."""

    vocab_size: int
    features: int

    def setup(self):
        self.weight = self.param(
            "weight", nn.initializers.normal(0.02), (self.vocab_size, self.features)
        )
        self.scale = _scale(self)

    def __call__(self, tokens: at.Tokens) -> at.Hidden:
        rows = self.weight[tokens]
        if self.scale is not None:
            scale = self.scale[tokens][:, :, None]
            rows = (rows.astype(jnp.float32) * scale.astype(jnp.float32)).astype(scale.dtype)
        return rows.transpose(2, 0, 1)

    def logits(self, hidden: at.Hidden) -> at.Logits:
        return _times(self.weight, self.scale, hidden)


class Transformer(nn.Module):
    """The target.

    Attributes:
        config: Its shape.
        target_layer_ids: Taps: id i is the hidden state after decoder layer i.
        last_tap: Whether a tap on the last layer is taken after the final norm (Hugging Face) or before it.
    """

    config: TargetConfig
    target_layer_ids: tuple[int, ...] = ()
    last_tap: str = "post_norm"

    def setup(self):
        c = self.config
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = [DecoderLayer(c, moe=c.mixture(i)) for i in range(c.num_hidden_layers)]
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = Embedding(c.vocab_size, c.hidden_size)

    def embed(self, tokens: at.Tokens) -> at.Hidden:
        return self.embed_tokens(tokens)

    def logits(self, hidden: at.Hidden) -> at.Logits:
        """Float32 logits `[V, B, T]` of normed hidden states (the target's or a draft's)."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return head.logits(hidden)

    def __call__(self, tokens: at.Tokens, cache: KVCache) -> tuple[at.Hidden, at.Context, KVCache]:
        """Runs `tokens` at positions `[cache.length, cache.length + T)` of each row.

        Args:
            tokens: Ids `[B, T]`.
            cache: Must have T free slots behind every row, and two for one token; the caller checks.

        Returns:
            Normed hidden states `[D, B, T]`; the taps `[C * D, B, T]`, concatenated in the order of
            `target_layer_ids`; the cache with T rows written and its length unchanged.
        """
        c = self.config
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        table = rope_table(c.rope, c.head_dim, positions)
        masks = {
            w: causal_mask(positions, cache.size, w)
            for w in {c.window(i) for i in range(c.num_hidden_layers)}
        }
        x = self.embed(tokens)
        taps, keys, values = {}, [], []
        for i, layer in enumerate(self.layers):
            x, k, v = layer(x, table, cache.k[i], cache.v[i], cache.length, masks[c.window(i)])
            keys.append(k)
            values.append(v)
            if i in self.target_layer_ids:
                taps[i] = x
        hidden = self.norm(x)
        if self.last_tap == "post_norm" and c.num_hidden_layers - 1 in taps:
            taps[c.num_hidden_layers - 1] = hidden
        context = extract_context_feature(taps, self.target_layer_ids, hidden)
        return hidden, context, cache.replace(k=tuple(keys), v=tuple(values))


def extract_context_feature(
    taps: dict[int, at.Hidden], ids: tuple[int, ...], like: at.Hidden
) -> at.Context:
    """Concatenates the tapped states along the feature axis; `[0, B, T]` without taps.

    Source: dflash 0.1.0 `extract_context_feature`.
    """
    return jnp.concatenate([taps[i] for i in ids], axis=0) if ids else like[:0]
