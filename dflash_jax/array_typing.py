"""Axis names and array types used in every annotation, einsum and docstring of this package.

  B  batch                      D  model width (HF `hidden_size`)
  T  query length               F  MLP width (HF `intermediate_size`)
  S  cache slots                V  vocabulary size
  N  query heads                L  transformer layers
  K  key/value heads            C  taps: target layers the draft reads
  G  query heads per kv head    Q  block size: the anchor and P proposals
  H  head width                 P  proposals a block, Q - 1
  A  anchors of a training row

Activations are **feature-major**, `[D, B, T]`: the feature axis comes first, so a projection
reads y = W x with Hugging Face's own `[out, in]` weight as the left operand. On the CPU that is
what makes a product with 2 to 16 rows cheap. Tokens and positions stay `[B, T]`.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Bool, Float, Int

Params = Mapping[str, Any]
Tokens = Int[Array, "B T"]
Positions = Int[Array, "B T"]
Rows = Int[Array, " B"]
Hidden = Float[Array, "D B T"]
Context = Float[Array, "CD B T"]
Logits = Float[Array, "V B T"]
Queries = Float[Array, "N H B T"]
KeyValues = Float[Array, "B K S H"]
Mask = Bool[Array, "B S T"]
RopeTable = tuple[Float[Array, "half B T"], Float[Array, "half B T"]]
