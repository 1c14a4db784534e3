"""Checkpoints of the Hugging Face hub: fetched, or one line on why not and what was perhaps meant."""

import difflib
from pathlib import Path
from typing import Any

from dflash_jax.checkpoint.files import one_line

# Public pairs of kinds that this library reads, target: draft. Source: z-lab's DFlash collection.
PAIRS = {
    "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
    "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "z-lab/Qwen3-Coder-30B-A3B-DFlash",
    "meta-llama/Llama-3.1-8B-Instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
}


def fetch(ref: str, patterns: list[str]) -> Path:
    """The local folder of a hub id's files.

    Raises:
        ValueError: If the hub does not give it: offline, gated, misspelt; one line, with the nearest names.
    """
    import huggingface_hub
    from huggingface_hub import errors

    # The first base is the HTTP library's own error, whichever library this version builds on.
    network = (OSError, ValueError, errors.HfHubHTTPError.__bases__[0])
    try:
        return Path(huggingface_hub.snapshot_download(ref, allow_patterns=patterns))
    except errors.GatedRepoError as e:
        raise ValueError(
            f"{ref!r} is gated: accept its licence at its page on the hub, and log in with `hf auth login`"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise ValueError(
            f"{ref!r} is no local path, and the hub has no such repository, or a private one that needs "
            f"`hf auth login`{did_you_mean(ref)}"
        ) from e
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) as e:
        raise ValueError(
            f"{ref!r} is no local path, is not in the hub's local cache, and could not be fetched: "
            f"{_why(e)}{did_you_mean(ref)}"
        ) from e
    except network as e:
        raise ValueError(
            f"{ref!r} is no local path and could not be fetched from the hub: {one_line(e)}"
        ) from e


def did_you_mean(ref: str) -> str:
    """The end of a sentence about an unknown id: the known ones like it, if there are any."""
    near = nearest(ref, [*cached_ids(), *PAIRS, *PAIRS.values()])
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest(ref: str, known: list[str]) -> list[str]:
    """Up to three of the known ids, those most like `ref` first: as a whole, or without the owner."""
    spellings = {k.lower(): k for k in known}
    spellings |= {k.split("/")[-1].lower(): k for k in known}
    name = ref.lower().strip("/")
    found: list[str] = []
    for spelling in (name, name.split("/")[-1]):
        near = difflib.get_close_matches(spelling, spellings, n=3, cutoff=0.8)
        found += [spellings[n] for n in near]
    return [n for n in dict.fromkeys(found) if n != ref][:3]


def cached_ids() -> list[str]:
    """Ids of the models in the hub's local cache."""
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        repos: Any = huggingface_hub.scan_cache_dir().repos
    except (CacheNotFound, OSError, ValueError):
        return []
    return sorted(repo.repo_id for repo in repos if repo.repo_type == "model")


def _why(error: BaseException) -> str:
    """What kept the hub away; a download that failed over to the cache hides it behind its own error."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return f"no connection to the hub ({one_line(error.__cause__ or error, 120)})"
