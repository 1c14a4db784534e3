"""The draft heads of the family beyond plain DFlash, under their checkpoints' own names."""

import dataclasses
from typing import Any


def require_positive(head: Any, but: tuple[str, ...] = ()) -> None:
    """Raises ValueError for a field below 1 or above 2^20, those named in `but` aside."""
    for field in dataclasses.fields(head):
        value = getattr(head, field.name)
        if field.name not in but and not 1 <= value <= 2**20:
            raise ValueError(f"{field.name}={value!r} must be at least 1 and at most {2**20}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2:
    """Convolutions around every sublayer, and a walk over the likeliest candidates."""

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int

    def __post_init__(self):
        require_positive(self)

    def check(self, hidden_size: int, vocab_size: int) -> None:
        """Raises ValueError if it does not fit a draft of this size."""
        if hidden_size % self.conv_group_size:
            raise ValueError(f"{self.conv_group_size=} does not divide {hidden_size=}")
        if self.selector_top_k > vocab_size:
            raise ValueError(f"{self.selector_top_k=} is above {vocab_size=}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domino:
    """A GRU over the tokens chosen so far corrects the draft's logits."""

    emb_dim: int
    gru_hidden_dim: int
    pure_draft_prefix_len: int = 0
    shift_label: bool = False

    def __post_init__(self):
        require_positive(self, but=("pure_draft_prefix_len", "shift_label"))
        if self.pure_draft_prefix_len < 0:
            raise ValueError(f"{self.pure_draft_prefix_len=} must be at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSpark:
    """A low-rank bigram term from the token before each slot is added to the draft's logits."""

    markov_rank: int
    markov_head_type: str = "vanilla"

    def __post_init__(self):
        require_positive(self, but=("markov_head_type",))
        if self.markov_head_type != "vanilla":
            raise ValueError(
                f"markov_head_type={self.markov_head_type!r} is not supported, only 'vanilla': what the "
                "gated and the RNN form compute is not documented"
            )


Head = DFlash2 | Domino | DSpark
