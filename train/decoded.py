"""Acceptance by really decoding held-out prompts, with the draft as it is in memory.

The teacher-forced acceptance length of `evaluate.py` asks at random positions of the target's own
answers; this one runs the decoder, so it also sees the positions that a draft's own rounds lead to,
its context cache, and the rounding of an exported draft.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dflash_jax.config import DraftConfig
from dflash_jax.generation import MAX_ROWS
from dflash_jax.jobs import Row, make_job
from dflash_jax.pair import Draft, Target, check_dtype
from dflash_jax.sampling import Sampling
from dflash_jax.states import PREFILL_CHUNK, capacity
from dflash_jax.text import Detokenizer
from train.store import Example
from train.warm_start import fold_scale


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Held-out prompts that were decoded, and what became of each."""

    examples: Sequence[Example]
    rows: Sequence[Row]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round; NaN if no round ran."""
        counts = [count for row in self.rounds for count in row]
        return float(np.mean(counts)) if counts else float("nan")

    @property
    def rounds(self) -> list[list[int]]:
        """Tokens that each prompt's rounds committed."""
        return [row.rounds for row in self.rows]


def draft_in_memory(config: DraftConfig, params: Any, feature_scale: Float[Array, " CD"]) -> Draft:
    """What `load_draft` would make of an export of these parameters: rounded to bfloat16, in the decoder's dtype."""
    return Draft(config, _rounded(fold_scale(params, feature_scale)), Path("the run's memory"))


@jax.jit
def _rounded(params: Any) -> Any:
    dtype = check_dtype(None)
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        params,
    )  # fmt: skip


def choose(examples: Sequence[Example], count: int) -> list[Example]:
    """Up to `count` examples, evenly over the set, whose kinds may lie one behind the other."""
    count = min(count, len(examples))
    return [examples[i * len(examples) // count] for i in range(count)]


def decode_examples(
    target: Target,
    draft: Draft,
    examples: Sequence[Example],
    max_new_tokens: int,
    rows: int = MAX_ROWS,
) -> Decoded:
    """Decodes the examples' prompts greedily.

    Every batch has the same rows and, for its whole length, the same slots, so the same examples with
    other parameters never compile anew.

    Args:
        target: The pair's target.
        draft: From `draft_in_memory`.
        examples: At least one.
        max_new_tokens: A prompt; fewer where the target has no more positions.
        rows: Prompts at once.

    Raises:
        ValueError: For a prompt that the target cannot read.
        FloatingPointError: If the target's logits are not numbers.
    """
    prompts = [e.tokens[: e.prompt_length].tolist() for e in examples]
    rows = min(rows, len(prompts))
    room = max(max_new_tokens + draft.config.max_proposals + 1, PREFILL_CHUNK)
    size = capacity(max(map(len, prompts)) + room)
    done: list[Row] = []
    for start in range(0, len(prompts), rows):
        batch = prompts[start : start + rows]
        padded = [*batch, *[batch[-1]] * (rows - len(batch))]
        job = make_job(target, draft, padded, max_new_tokens, None, Sampling(), None)
        found = {index: row for index, row, _ in job.run(job.start(range(rows), size))}
        done += [found[i] for i in range(len(batch))]
    return Decoded(examples, done)


def sample_records(
    step: int, name: str, decoded: Decoded, tokenizer: Any, count: int
) -> list[dict]:
    """The first `count` prompts as records: the prompt, the text of each round, tokens by round, the end.

    Args:
        tokenizer: The target's, or None, for ids in the place of text.
    """
    records = []
    for example, row in list(zip(decoded.examples, decoded.rows))[:count]:
        prompt = example.tokens[: example.prompt_length].tolist()
        pieces, text = [], Detokenizer(tokenizer or _Ids())
        counts = [
            len(row.tokens) - sum(row.rounds),
            *row.rounds,
        ]  # the first token comes from prefill
        for end, taken in zip(np.cumsum(counts), counts):
            pieces.append(text.push(row.tokens[end - taken : end]))
        pieces[-1] += text.finish()
        records.append(
            {
                "step": step, "set": name, "id": example.id, "prompt": (tokenizer or _Ids()).decode(prompt),
                "pieces": pieces, "rounds": row.rounds, "finish": row.finish,
            }
        )  # fmt: skip
    return records


class _Ids:
    """Stands in for a tokenizer where the target has none."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{i} " for i in ids)
