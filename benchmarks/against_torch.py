"""Seconds per round beside dflash 0.1.0 and transformers on torch, with the same weights, rounds and tokens.

    python -m benchmarks.against_torch [--repeats 5] [--used 256 4096]

The embedded target in float32 with a draft of three layers and random weights, of which hardly a proposal is
accepted, so that both run a round a token; their tokens must be equal. Runs of 16 rounds alternate behind the same prompt,
whose reading is not counted, half a second apart; torch has the better of one and two threads. Needs torch, accelerate and
`pip install --no-deps dflash==0.1.0`. Writes `benchmarks/results/against_torch.json`.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.decoding import BLOCK, random_draft
from dflash_jax.adapters import bind
from dflash_jax.checkpoint.export import save_draft
from dflash_jax.decode import decode, prefill
from dflash_jax.pair import Draft, Target, embedded_target, load_target
from dflash_jax.states import PREFILL_CHUNK, capacity, new_draft_cache, new_state

ROUNDS = 16
PAUSE = 0.5  # seconds; torch's threads spin on for a while behind its last operation
Run = Callable[[], tuple[list[int], list[float]]]
"""Generates; gives the tokens and the seconds of each round."""


def ours(target: Target, draft: Draft | None, prompt: list[int]) -> Run:
    """Rounds of `decode` behind the prompt, which is read once."""
    models, params = bind(target, draft)
    size = capacity(len(prompt) + 128)
    state = new_state(target, [prompt], [size - len(prompt)], (), size)
    if draft is not None:
        state = state.replace(draft=new_draft_cache(draft, 1, size))
    state = jax.tree.map(jnp.copy, state)
    ready = prefill(models.target, models.draft, params, state, chunk=PREFILL_CHUNK)

    def run() -> tuple[list[int], list[float]]:
        state, seconds = jax.block_until_ready(jax.tree.map(jnp.copy, ready)), []
        start = time.perf_counter()
        state = jax.block_until_ready(decode(models, params, state, np.int32(ROUNDS)))
        seconds.append((time.perf_counter() - start) / ROUNDS)
        return np.asarray(state.tokens)[0, len(prompt) : int(state.length[0])].tolist(), seconds

    return run


def theirs(target: Any, draft: Any, prompt: list[int]) -> Run:
    """dflash's generation, or transformers' without a draft; a round lasts from one call of the target to the next."""
    import torch
    from dflash.model import dflash_generate

    calls: list[float] = []
    target.register_forward_pre_hook(lambda *_: calls.append(time.perf_counter()))
    ids = torch.tensor([prompt])

    def run() -> tuple[list[int], list[float]]:
        calls.clear()
        if draft is None:
            out = target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=ROUNDS + 2, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
        else:
            out = dflash_generate(draft, target, ids, ROUNDS + 2, None)
        rounds = np.diff(calls[1:])  # the first call reads the prompt
        return out[0, len(prompt) :].tolist(), rounds.tolist()

    return run


def measure(own: Run, other: Run, repeats: int) -> dict[str, Any]:
    import torch

    seconds: dict[str, list[float]] = {"ours": [], "torch, 1 thread": [], "torch, 2 threads": []}
    for n in range(-1, repeats):
        found = {}
        for way, values in seconds.items():
            if way != "ours":
                torch.set_num_threads(int(way.split()[1]))
            time.sleep(PAUSE)
            found[way], each = (own if way == "ours" else other)()
            if n >= 0:
                values.append(statistics.median(each))
        shared = min(map(len, found.values()))
        assert shared >= ROUNDS
        assert len({tuple(tokens[:shared]) for tokens in found.values()}) == 1, found
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    best = min(value for way, value in medians.items() if way != "ours")
    return {"median_seconds_a_round": medians, "ours_over_torch": medians["ours"] / best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each")
    parser.add_argument("--used", type=int, nargs="*", default=[256, 4096], help="prompt lengths")
    args = parser.parse_args()
    import torch
    from dflash.model import DFlashDraftModel
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")  # dflash calls transformers by names that it deprecates
    path = embedded_target()
    target = load_target()
    draft = random_draft(target, BLOCK)
    their_target = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "draft"
        save_draft(saved, draft.config, draft.params, dtype="float32")
        their_draft = DFlashDraftModel.from_pretrained(saved, dtype=torch.float32).eval()
    results = {}
    for used in args.used:
        prompt = np.random.default_rng(used).integers(20, 20_000, used).tolist()
        for name, pair in (("DFlash", (draft, their_draft)), ("plain", (None, None))):
            own, other = ours(target, pair[0], prompt), theirs(their_target, pair[1], prompt)
            case = f"{name}, {used} used"
            results[case] = measure(own, other, args.repeats)
            print(json.dumps({case: results[case]}, indent=1), flush=True)
    versions = {"torch": torch.__version__, "dflash": "0.1.0"}
    print(timing.write("against_torch", {"versions": versions, "cases": results}))


if __name__ == "__main__":
    main()
