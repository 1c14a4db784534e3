"""A DFlash draft's config, and the dialect it is written in."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dflash_jax.config.dialects import is_nested, read_flat, read_nested
from dflash_jax.config.fields import build
from dflash_jax.config.heads import DFlash2, Head
from dflash_jax.config.transformer import TransformerConfig, require_integer

WindowRule = Literal["zlab", "nemo", "specforge", "speculators"]
WINDOW_RULES: tuple[WindowRule, ...] = ("zlab", "nemo", "specforge", "speculators")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig(TransformerConfig):
    """A DFlash draft.

    Attributes:
        block_size: Q, the anchor and Q - 1 proposals; Q proposals with `sample_from_anchor`.
        mask_token_id: Id that fills the block's other slots.
        target_layer_ids: Taps: id i is the hidden state after the target's decoder layer i.
        num_target_layers: Decoder layers of the target that it was trained for; None if not told.
        last_tap: What a tap on the target's last layer means: the state after its final norm, as Hugging
            Face's `hidden_states[-1]`, or before it, as serving engines have it.
        head: What turns the hidden states into proposals; None is the target's head alone.
        is_causal: Whether a block's slots see only the slots before them. None: in sliding layers they
            do (not under NeMo's rule) and in full layers not; where all layers are of one kind it becomes
            the bool that this is.
        window_rule: Whose rule sliding layers follow, named after the trainer; see `ops.mask`.
        input_embedding_scale: Multiplies the block's embeddings.
        output_multiplier: Multiplies the logits.
        final_logit_softcapping: Then caps them, as `c * tanh(logits / c)`.
        sample_from_anchor: Slot k predicts the token at the anchor's position + 1 + k, not + k.
        draft_vocab_size: Ids the draft can propose, if not the whole vocabulary; its own head has so
            many rows, and `d2t` names them.
        own_embedding: Whether the draft has a token table of its own; otherwise the target's.
        own_head: Whether the draft has a head of its own; otherwise the target's.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    last_tap: Literal["post_norm", "pre_norm"] = "post_norm"
    head: Head | None = None
    is_causal: bool | None = None
    window_rule: WindowRule = "zlab"
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    sample_from_anchor: bool = False
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    own_head: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.block_size < 1:
            raise ValueError(f"{self.block_size=} must be at least 1")
        if self.block_size > 4096:
            raise ValueError(f"{self.block_size=} must be at most 4096")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"{self.mask_token_id=} is not in [0, {self.vocab_size})")
        if self.window_rule not in WINDOW_RULES:
            raise ValueError(f"window_rule={self.window_rule!r} must be one of {WINDOW_RULES}")
        if self.is_causal is None and len(set(self.layer_types)) == 1:
            object.__setattr__(self, "is_causal", self.causal(0))
        for name in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value!r} must be positive")
        if self.draft_vocab_size is not None:
            if not 0 < self.draft_vocab_size < self.vocab_size:
                raise ValueError(f"{self.draft_vocab_size=} is not in [1, {self.vocab_size})")
            if isinstance(self.head, DFlash2):
                raise ValueError(f"{self.draft_vocab_size=}: this head needs the whole vocabulary")
            object.__setattr__(self, "own_head", True)
        if isinstance(self.head, DFlash2):
            self.head.check(self.hidden_size, self.vocab_size)
        check_target_layer_ids(self.target_layer_ids, self.num_target_layers)

    @property
    def max_proposals(self) -> int:
        """Tokens that one block of the trained size proposes."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def slides_everywhere(self) -> bool:
        """Whether no layer sees beyond the window."""
        return set(self.layer_types) == {"sliding_attention"}

    def causal(self, layer: int) -> bool:
        """Whether `layer` is causal inside the block."""
        slides = self.window(layer) is not None
        return slides and self.window_rule != "nemo" if self.is_causal is None else self.is_causal

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        target_layer_ids: tuple[int, ...] | Literal["default"] | None = None,
        *,
        window_rule: WindowRule | None = None,
        sample_from_anchor: bool | None = None,
        num_target_layers: int | None = None,
    ) -> "DraftConfig":
        """Reads the flat dialect (z-lab, NeMo, SpecForge) or the nested one (speculators).

        Missing tap ids are an error, because the formula is wrong for most published drafts;
        `target_layer_ids` gives them, or asks for the formula with "default".

        Args:
            config: A parsed `config.json`.
            target_layer_ids: Stand above the config's.
            window_rule: Stands above the dialect's: "speculators" for the nested one, "nemo" or
                "specforge" for a class that only that trainer writes, else "zlab".
            sample_from_anchor: Stands above the config's, which often does not say.
            num_target_layers: For the nested dialect, which does not say.

        Raises:
            ValueError: If a key is missing, unknown, out of bounds, or contradicts another.
        """
        fields = read_nested(config) if is_nested(config) else read_flat(config)
        depth = fields["num_target_layers"]
        depth = num_target_layers if depth is None else depth
        ids = target_layer_ids or fields["target_layer_ids"]
        if target_layer_ids == "default":
            if depth is None:
                raise ValueError("the formula for target_layer_ids needs num_target_layers")
            ids = build_target_layer_ids(depth, fields["num_hidden_layers"])
        if ids is None:
            raise ValueError(
                "the draft's config lacks target_layer_ids; give them, or \"default\" for the reference's formula"
            )
        for i in ids:
            require_integer("an entry of target_layer_ids", i)
        fields |= {"target_layer_ids": tuple(ids), "num_target_layers": depth}
        given = {"window_rule": window_rule, "sample_from_anchor": sample_from_anchor}
        return build(cls, fields | {k: v for k, v in given.items() if v is not None})


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Taps spread evenly over the target: one a draft layer, from layer 1 to three before the last.

    For creating new drafts; a published draft's own ids often differ.

    Source: dflash 0.1.0 `build_target_layer_ids` (rounds halves to even).
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def check_target_layer_ids(ids: tuple[int, ...], num_target_layers: int | None) -> None:
    """Raises ValueError unless the ids are distinct, ascending decoder layers of the target (of any depth: None)."""
    depth = float("inf") if num_target_layers is None else num_target_layers
    if not ids or any(not 0 <= i < depth for i in ids):
        raise ValueError(f"target_layer_ids={list(ids)} must be ids in [0, {depth})")
    if list(ids) != sorted(set(ids)):
        raise ValueError(f"target_layer_ids={list(ids)} must be distinct and ascending")
