"""Domino: a GRU over the tokens chosen so far corrects the logits of the slot behind them.

Source: SpecForge 0.2.0 `DominoDraftModel`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax import array_typing as at
from dflash_jax.config import DraftConfig
from dflash_jax.config.heads import Domino
from dflash_jax.models.heads.seam import Correction, Embed, Head, Matrix, Pick, column, walk
from dflash_jax.ops.product import product
from dflash_jax.sampling import Proposals, join


def settings(config: DraftConfig) -> Domino:
    assert isinstance(config.head, Domino)
    return config.head


class GRU(nn.Module):
    """The weights of PyTorch's, one layer without biases."""

    inputs: int
    width: int

    def setup(self):
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
        self.weight_ih_l0 = self.param("weight_ih_l0", init, (3 * self.width, self.inputs))
        self.weight_hh_l0 = self.param("weight_hh_l0", init, (3 * self.width, self.width))


def gru_step(
    w_ih: Float[Array, "gates D"],
    w_hh: Float[Array, "gates G"],
    state: Float[Array, "G B 1"],
    x: Float[Array, "D B 1"],
) -> Float[Array, "G B 1"]:
    """The float32 state after reading `x`; the gates' rows lie in the order reset, update, new."""
    x_r, x_z, x_n = jnp.split(product(w_ih, x.astype(w_ih.dtype)), 3)
    h_r, h_z, h_n = jnp.split(product(w_hh, state.astype(w_hh.dtype)), 3)
    reset, update = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    return (1 - update) * jnp.tanh(x_n + reset * h_n) + update * state


class Projection(nn.Module):
    """The two matrices of the checkpoint's `nn.Sequential`, under its numbers."""

    shapes: tuple[tuple[int, int], tuple[int, int]]

    @nn.compact
    def __call__(self):
        first, last = self.shapes
        return Matrix(first, name="0").weight, Matrix(last, name="2").weight


class DominoHead(Head):
    """The first `pure_draft_prefix_len` proposals are the draft's own, the others corrected."""

    def setup(self):
        c, h = self.config, settings(self.config)
        self.prefix_gru = GRU(c.hidden_size, h.gru_hidden_dim)
        self.embed_proj = Projection(
            (
                (h.emb_dim, c.hidden_size + h.gru_hidden_dim),
                (c.draft_vocab_size or c.vocab_size, h.emb_dim),
            )
        )

    @property
    def first_slot(self) -> int:
        return 0 if settings(self.config).shift_label else 1

    def propose(
        self, hidden: at.Hidden, logits: at.Logits, anchor: at.Rows, embed: Embed, pick: Pick
    ) -> Proposals:
        h, P = settings(self.config), logits.shape[2]
        weights, (of_hidden, of_state, outer) = self._weights()
        from_hidden = product(of_hidden, hidden)

        def step(state, previous, i):
            state = gru_step(*weights, state, embed(previous[:, None]))
            y = column(from_hidden, i) + product(of_state, state.astype(of_state.dtype))
            correction = product(outer, nn.silu(y).astype(outer.dtype))
            return pick(column(logits, i) + correction, i + 1), state

        pure = min(h.pure_draft_prefix_len, P)
        state = jnp.zeros((h.gru_hidden_dim, len(anchor), 1))
        if not pure:
            return walk(step, state, anchor, P)
        own = pick(logits[:, :, :pure], 1)
        chosen = jnp.concatenate([anchor[:, None], own.tokens], axis=1)
        for k in range(pure):
            state = gru_step(*weights, state, embed(chosen[:, k : k + 1]))
        return join([own, walk(step, state, chosen[:, pure], P, start=pure)])

    def forced(self, hidden: at.Hidden, tokens: at.Tokens, embed: Embed) -> Correction:
        h, (B, P) = settings(self.config), tokens.shape
        weights, (of_hidden, of_state, outer) = self._weights()

        def step(state, x):
            state = gru_step(*weights, state, x[:, :, None])
            return state, state[:, :, 0]

        start = jnp.zeros((h.gru_hidden_dim, B, 1))
        states = jax.lax.scan(step, start, jnp.moveaxis(embed(tokens), 2, 0))[1]
        states = jnp.moveaxis(states, 0, 2).astype(of_state.dtype)
        y = nn.silu(product(of_hidden, hidden) + product(of_state, states))
        return Correction(outer, y * (jnp.arange(P) >= h.pure_draft_prefix_len)[None, None])

    def _weights(self):
        """The GRU's two matrices; the projection's first, for states and for the GRU's, and second."""
        inner, outer = self.embed_proj()
        D = self.config.hidden_size
        gru = self.prefix_gru
        return (gru.weight_ih_l0, gru.weight_hh_l0), (inner[:, :D], inner[:, D:], outer)
