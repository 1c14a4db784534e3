"""What a draft head is: it takes the draft's hidden states and the anchor, and yields proposals.

And the draft's layer, which a head may replace by one of its own.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_jax import array_typing as at
from dflash_jax.config import DraftConfig
from dflash_jax.models.transformer import Attention, DecoderLayer
from dflash_jax.sampling import Proposals

Embed = Callable[[at.Tokens], at.Hidden]
"""The target's embedding of ids `[B, T]`."""


@runtime_checkable
class Pick(Protocol):
    """Turns logits into proposals; see `sampling.Picker`."""

    def __call__(
        self, logits: at.Logits, slot: int | Int[Array, ""], ids: Int[Array, "..."] | None = None
    ) -> Proposals: ...


class Correction(NamedTuple):
    """What a head adds to the logits, of low rank: `table @ columns`.

    Attributes:
        table: A row for each id that the draft can propose.
        columns: Of each proposal, float32.
    """

    table: Float[Array, "V X"]
    columns: Float[Array, "X B T"]


class DFlashAttention(Attention):
    """The references' name; keys and values of the context skip the input norm, all else is `Attention`."""


class DFlashDecoderLayer(DecoderLayer):
    """Mixes slots by attention alone.

    `blocks`, how many lie one behind the other on the T axis, is for layers that filter along it.
    """

    attention_type: type[Attention] = DFlashAttention

    def project(
        self, x: at.Hidden, table: at.RopeTable, blocks: int = 1
    ) -> tuple[at.Queries, at.KeyValues, at.KeyValues]:
        return super().project(x, table)

    def finish(self, x: at.Hidden, attended: Float[Array, "NH B T"], blocks: int = 1) -> at.Hidden:
        return super().finish(x, attended)


class Head(nn.Module):
    """A head's parameters, which lie beside the draft's own, and how it proposes.

    Heads turn logits into tokens by `pick` alone, so greedy decoding, sampling and rejection work in
    every head without its knowledge.

    Attributes:
        config: The draft's; its `head` holds the head's own numbers.
        layer_type: The draft's layers.
    """

    config: DraftConfig
    layer_type: ClassVar[type[DFlashDecoderLayer]] = DFlashDecoderLayer

    @property
    def first_slot(self) -> int:
        """The block slot whose hidden state predicts the token behind the anchor."""
        return 1

    def propose(
        self, hidden: at.Hidden, logits: at.Logits, anchor: at.Rows, embed: Embed, pick: Pick
    ) -> Proposals:
        """Proposals for the P tokens behind the anchor; by default all at once, none depending on another.

        Args:
            hidden: `[D, B, P]`: state i predicts the token i + 1 behind the anchor.
            logits: The target's head's, `[V, B, P]`, float32.
            anchor: Each row's newest token.
            embed: For heads that read the tokens chosen so far.
            pick: Called with logits `[X, B, T]`, the slot of the first, and the ids of the X.
        """
        return pick(logits, 1)

    def forced(self, hidden: at.Hidden, tokens: at.Tokens, embed: Embed) -> Correction | None:
        """What `propose` adds to the logits if every token before a proposal is the true one; for training.

        Args:
            hidden: `[D, B, P]`, as for `propose`; many blocks of a sequence lie on the B axis.
            tokens: The true token before each proposal, `[B, P]`, the anchor's first.
            embed: As for `propose`.
        """
        return None

    @property
    def candidates(self) -> int:
        """How many of a slot's likeliest ids the correction chooses among; 0 is all."""
        return 0


class Matrix(nn.Module):
    """A weight under the name `weight`, for use as an array."""

    shape: tuple[int, int]
    initializer: nn.initializers.Initializer = nn.initializers.normal(0.02)

    def setup(self):
        self.weight = self.param("weight", self.initializer, self.shape)


def walk(
    step: Callable[[Any, at.Rows, Int[Array, ""]], tuple[Proposals, Any]],
    carry: Any,
    previous: at.Rows,
    count: int,
    start: int = 0,
) -> Proposals:
    """Proposals `start` to `count - 1`, each of which may depend on the one before.

    A scan, so that the program does not grow with the block; weights are constants of its body, which it
    reads in place.

    Args:
        step: Takes (carry, the token before, i) and gives proposal i, with T = 1, and the next carry.
        previous: The token before proposal `start`.
    """

    def body(state, i):
        carry, previous = state
        proposals, carry = step(carry, previous, i)
        return (carry, proposals.tokens[:, 0]), proposals

    each = jnp.arange(start, count, dtype=jnp.int32)
    parts = jax.lax.scan(body, (carry, previous), each)[1]
    return jax.tree.map(lambda x: jnp.moveaxis(x[..., 0], 0, -1), parts)


def column(x: Shaped[Array, "X B T"], i: Int[Array, ""]) -> Shaped[Array, "X B 1"]:
    return jax.lax.dynamic_slice_in_dim(x, i, 1, axis=2)
