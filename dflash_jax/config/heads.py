"""The draft heads of the family beyond plain DFlash, under their checkpoints' own names."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2:
    """Convolutions around every sublayer, and a walk over the likeliest candidates."""

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domino:
    """A GRU over the tokens chosen so far corrects the draft's logits."""

    emb_dim: int
    gru_hidden_dim: int
    pure_draft_prefix_len: int = 0
    shift_label: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSpark:
    """A low-rank bigram term from the token before each slot is added to the draft's logits."""

    markov_rank: int
    markov_head_type: str = "vanilla"

    def __post_init__(self):
        if self.markov_head_type != "vanilla":
            raise ValueError(
                f"markov_head_type={self.markov_head_type!r} is not supported, only 'vanilla': what the "
                "gated and the RNN form compute is not documented"
            )


Head = DFlash2 | Domino | DSpark
