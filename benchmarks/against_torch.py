"""Seconds per round beside dflash 0.1.0 and transformers on torch, with the same weights, rounds and tokens.

    python -m benchmarks.against_torch [--repeats 5] [--used 256 4096]

The embedded target in float32 with a draft of three layers and random weights, of which hardly a proposal is
accepted, so that both run a round a token; their tokens must be equal. Each has a process of its own, as its users have
it. Runs of 16 rounds alternate behind the same prompt, whose reading is not counted, half a second apart; torch has one
thread or two, whichever its first runs were faster with. Needs torch, accelerate and
`pip install --no-deps dflash==0.1.0`. Writes `benchmarks/results/against_torch.json`.
"""

import argparse
import concurrent.futures
import functools
import importlib.metadata
import json
import multiprocessing
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
Run = Callable[..., tuple[list[int], list[float]]]
"""Generates; gives the tokens and the seconds of each round."""
_theirs: dict[str, Any] = {}  # the models, in torch's process


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


def load_theirs(path: Path, draft: Path) -> None:
    """Reads both models, in torch's process."""
    import torch
    from dflash.model import DFlashDraftModel
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")  # dflash calls transformers by names that it deprecates
    dtype = torch.float32
    target = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    _theirs.update(target=target.eval(), calls=[])
    _theirs["draft"] = DFlashDraftModel.from_pretrained(draft, dtype=dtype).eval()
    target.register_forward_pre_hook(lambda *_: _theirs["calls"].append(time.perf_counter()))


def theirs(drafts: bool, prompt: list[int], threads: int) -> tuple[list[int], list[float]]:
    """dflash's generation, or transformers' without a draft; a round lasts from one call of the target to the next."""
    import torch
    from dflash.model import dflash_generate

    torch.set_num_threads(threads)
    target, calls, ids = _theirs["target"], _theirs["calls"], torch.tensor([prompt])
    calls.clear()
    if drafts:
        out = dflash_generate(_theirs["draft"], target, ids, ROUNDS + 2, None)
    else:
        out = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ROUNDS + 2, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    rounds = np.diff(calls[1:])  # the first call reads the prompt
    return out[0, len(prompt) :].tolist(), rounds.tolist()


def measure(own: Run, other: Run, repeats: int) -> dict[str, Any]:
    """Median seconds a round of both; `other` takes the number of threads, that of its faster first run."""
    (said, _), first = own(), {n: other(n) for n in (1, 2)}
    threads = min(first, key=lambda n: statistics.median(first[n][1]))
    ways = {"ours": own, "torch": functools.partial(other, threads)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            time.sleep(PAUSE)
            tokens, each = run()
            seconds[way].append(statistics.median(each))
            shared = min(len(tokens), len(said))
            assert shared >= ROUNDS
            assert tokens[:shared] == said[:shared], (way, tokens, said)
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    return {
        "median_seconds_a_round": medians,
        "threads_of_torch": threads,
        "ours_over_torch": medians["ours"] / medians["torch"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each")
    parser.add_argument("--used", type=int, nargs="*", default=[256, 4096], help="prompt lengths")
    args = parser.parse_args()
    target, results = load_target(), {}
    draft = random_draft(target, BLOCK)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "draft"
        save_draft(saved, draft.config, draft.params, dtype="float32")
        with concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), load_theirs, (embedded_target(), saved)
        ) as pool:
            for used in args.used:
                prompt = np.random.default_rng(used).integers(20, 20_000, used).tolist()
                for name, our_draft in (("DFlash", draft), ("plain", None)):

                    def other(threads: int, drafts=our_draft is not None, prompt=prompt):
                        return pool.submit(theirs, drafts, prompt, threads).result()

                    case = f"{name}, {used} used"
                    results[case] = measure(ours(target, our_draft, prompt), other, args.repeats)
                    print(json.dumps({case: results[case]}, indent=1), flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "dflash")}
    print(timing.write("against_torch", {"versions": versions, "cases": results}))


if __name__ == "__main__":
    main()
