"""DSpark's Markov head: the token before each slot adds a low-rank bigram term to its logits.

Only the vanilla form; without the confidence head, which says how far to trust a block but changes no
proposal. A draft of this kind predicts the token behind every slot, the anchor's included
(`sample_from_anchor`), as its trainers and the serving engines have it; SpecForge's reference
decoder reads it one slot late.

Source: speculators 0.9.0 `models/dspark`.
"""

import flax.linen as nn

from dflash_jax import array_typing as at
from dflash_jax.config import DraftConfig
from dflash_jax.config.heads import DSpark
from dflash_jax.models.heads.seam import Correction, Embed, Head, Matrix, Pick, column, walk
from dflash_jax.ops.product import product
from dflash_jax.sampling import Proposals


def rank(config: DraftConfig) -> int:
    assert isinstance(config.head, DSpark)
    return config.head.markov_rank


class MarkovHead(nn.Module):
    """Rows of the token before, `[V, R]`, and of those that the draft can propose behind it."""

    config: DraftConfig

    def setup(self):
        c = self.config
        self.markov_w1 = Matrix((c.vocab_size, rank(c)))
        self.markov_w2 = Matrix((c.draft_vocab_size or c.vocab_size, rank(c)))


class DSparkHead(Head):
    """Logits of a slot plus `w2 w1[token before]`."""

    def setup(self):
        self.markov_head = MarkovHead(self.config)

    @property
    def first_slot(self) -> int:
        return 0

    def propose(
        self, hidden: at.Hidden, logits: at.Logits, anchor: at.Rows, embed: Embed, pick: Pick
    ) -> Proposals:
        w1, w2 = self.markov_head.markov_w1.weight, self.markov_head.markov_w2.weight

        def step(carry, previous, i):
            bigram = product(w2, w1[previous].T[:, :, None])
            return pick(column(logits, i) + bigram, i + 1), carry

        return walk(step, None, anchor, logits.shape[2])

    def forced(self, hidden: at.Hidden, tokens: at.Tokens, embed: Embed) -> Correction:
        w1, w2 = self.markov_head.markov_w1.weight, self.markov_head.markov_w2.weight
        return Correction(w2, w1[tokens].transpose(2, 0, 1))
