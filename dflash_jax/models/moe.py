"""Qwen3-MoE's sparse MLP. An expert's three matrices are rows of one stacked leaf per projection."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax import array_typing as at
from dflash_jax.config import MoeConfig
from dflash_jax.ops.experts import expert_mlp


class Stack(nn.Module):
    """One projection of every expert, `[E, out, in]`."""

    num_experts: int
    in_features: int
    out_features: int

    @nn.compact
    def __call__(self) -> Float[Array, "E F D"]:
        init = nn.initializers.variance_scaling(
            1.0, "fan_in", "normal", in_axis=2, out_axis=1, batch_axis=0
        )
        return self.param("weight", init, (self.num_experts, self.out_features, self.in_features))


class Experts(nn.Module):
    config: MoeConfig
    features: int

    def setup(self):
        c = self.config
        self.gate_proj = Stack(c.num_experts, self.features, c.moe_intermediate_size)
        self.up_proj = Stack(c.num_experts, self.features, c.moe_intermediate_size)
        self.down_proj = Stack(c.num_experts, c.moe_intermediate_size, self.features)

    def __call__(
        self, x: at.Hidden, chosen: Int[Array, "B T k"], weights: Float[Array, "B T k"]
    ) -> at.Hidden:
        return expert_mlp(x, chosen, weights, self.gate_proj(), self.up_proj(), self.down_proj())


class Router(nn.Module):
    """Which experts a token passes through, and their weights."""

    config: MoeConfig
    features: int

    @nn.compact
    def __call__(self, x: at.Hidden) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
        """In float32 throughout, whatever the dtype of x and the weight; the weights are cast to x's last.

        A logit that is rounded can choose another expert, hence the full precision.

        Source: transformers `Qwen3MoeTopKRouter`, whose logits are in x's dtype.
        """
        c = self.config
        init = nn.initializers.normal(0.02)
        weight = self.param("weight", init, (c.num_experts, self.features))
        logits = jnp.einsum(
            "ED,DBT->EBT",
            weight.astype(jnp.float32),
            x.astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        probabilities = jax.nn.softmax(logits, axis=0).transpose(1, 2, 0)
        weights, chosen = jax.lax.top_k(probabilities, c.num_experts_per_tok)
        if c.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return chosen, weights.astype(x.dtype)


class SparseMLP(nn.Module):
    """Source: transformers `Qwen3MoeSparseMoeBlock`."""

    config: MoeConfig
    features: int

    def setup(self):
        self.gate = Router(self.config, self.features)
        self.experts = Experts(self.config, self.features)

    def __call__(self, x: at.Hidden) -> at.Hidden:
        return self.experts(x, *self.gate(x))
