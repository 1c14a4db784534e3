"""Writes drafts in the flat (z-lab) Hugging Face dialect, which every known consumer reads."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from dflash_jax import array_typing as at
from dflash_jax.checkpoint import keys
from dflash_jax.checkpoint.files import atomic_folder, write_json
from dflash_jax.config import DraftConfig


def save_draft(
    folder: str | Path, config: DraftConfig, params: at.Params, dtype: DTypeLike = jnp.bfloat16
) -> None:
    """Writes `config.json` and `model.safetensors`; the folder appears whole or not at all.

    Args:
        folder: Must not exist.
        dtype: Of the tensors; published drafts are bfloat16.

    Raises:
        ValueError: If the folder exists, or the parameters are not the config's.

    Source: the format of dflash 0.1.0, with the keys that vLLM, SGLang and the TPU runtimes read.
    """
    keys.check_params(params, config, "the parameters to export")
    tensors = {
        keys.name_of(path): np.ascontiguousarray(np.asarray(leaf).astype(dtype, copy=False))
        for path, leaf in keys.flatten(params).items()
    }
    with atomic_folder(folder) as temporary:
        write_json(temporary / "config.json", {**config.to_hf(), "dtype": jnp.dtype(dtype).name})
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
