"""A draft's first parameters, copied from the target's last layers.

A draft layer does nearly the work of a late target layer, on the same residual stream, so it starts
as a copy of one instead of random weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.checkpoint.keys import flatten, nest
from dflash_jax.config import DraftConfig
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.sharding import gathered
from train.store import Example
from train.vocabulary import target_ids


def random_params(config: DraftConfig, key: jax.Array) -> dict[str, Any]:
    """Random float32 parameters of a draft."""
    module = DFlashDraftModel(config)
    x = jax.ShapeDtypeStruct((config.hidden_size, 1, config.block_size), jnp.float32)
    context = jax.ShapeDtypeStruct(
        (len(config.target_layer_ids) * config.hidden_size, 1, 1), jnp.float32
    )
    anchors = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    @jax.jit  # which leaves out all but the parameters
    def init(key):
        zeros = [jnp.zeros(a.shape, a.dtype) for a in (x, context, anchors)]
        return module.init(key, *zeros, method="every_parameter")["params"]

    return dict(init(key))


def feature_scale(examples: Sequence[Example], sample: int = 64) -> Float[np.ndarray, " CD"]:
    """1 / rms of each channel of the taps, without position 0, whose activations are a thousand times larger."""
    rows = np.concatenate([e.features[1:-1].astype(np.float32) for e in examples[:sample]])
    return 1.0 / np.maximum(np.sqrt(np.mean(np.square(rows), axis=0)), 1e-6)


def warm_start(
    params: Mapping[str, Any],
    target: Mapping[str, Any],
    config: DraftConfig,
    scale: Float[np.ndarray, " CD"],
    examples: Sequence[Example],
    ids: Int[np.ndarray, " Vd"] | None = None,
) -> dict[str, Any]:
    """`params` with the target's last layers in place of the draft's, and `fc` passing the last tap through.

    Tables of the draft's own start as the target's, of a reduced vocabulary `ids` as its rows.

    The input norms are folded into the projections that they feed, since a draft's context does not
    pass them; the query and key norms, which the target may lack, start at the measured rms.

    Raises:
        ValueError: If the draft's layers have another shape than the target's.
    """
    depth, of_target = config.num_hidden_layers, sum(name.startswith("layers_") for name in target)
    if depth > of_target:
        raise ValueError(
            f"a warm start of {config.num_hidden_layers=} layers needs as many of the target's {of_target}"
        )
    started: dict[str, Any] = dict(params)
    D = config.hidden_size
    last_tap = np.concatenate([e.features[1:-1, -D:] for e in examples[:16]]).astype(np.float32)
    unit = last_tap / np.sqrt(np.mean(np.square(last_tap), axis=1, keepdims=True))
    for i in range(depth):
        source = gathered(target[f"layers_{of_target - depth + i}"])
        layer = dict(started[f"layers_{i}"])
        norm = source["input_layernorm"]["weight"]
        attention = dict(layer["self_attn"])
        for name in ("q_proj", "k_proj", "v_proj"):
            attention[name] = {"weight": source["self_attn"][name]["weight"] * norm[None]}
        attention["o_proj"] = dict(source["self_attn"]["o_proj"])
        for name in ("q", "k"):
            heads = (unit @ np.asarray(attention[f"{name}_proj"]["weight"]).T).reshape(
                -1, config.head_dim
            )
            attention[f"{name}_norm"] = {
                "weight": jnp.asarray(np.sqrt(np.mean(np.square(heads), axis=0)))
            }
        layer["self_attn"] = attention
        layer["mlp"] = source["mlp"]
        layer["post_attention_layernorm"] = source["post_attention_layernorm"]
        if jax.tree.map(jnp.shape, layer) != jax.tree.map(jnp.shape, dict(started[f"layers_{i}"])):
            raise ValueError("a warm start needs draft layers of the target's shape")
        started[f"layers_{i}"] = layer
    fc = np.zeros(started["fc"]["weight"].shape, np.float32)
    fc[:, -D:] = np.diag(1.0 / scale[-D:])
    started["fc"] = {"weight": jnp.asarray(fc)}
    if config.own_embedding:
        started["embed_tokens"] = target["embed_tokens"]
    if config.own_head:
        rows = target.get("lm_head", target["embed_tokens"])["weight"]
        started["lm_head"] = {"weight": rows if ids is None else rows[ids]}
    # Half the target's scale: the first guesses should not be as sure as the target.
    started["norm"] = {"weight": gathered(target["norm"]["weight"]) * 0.5}
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32), started)


# What a new layer or head gives to the rest of a draft that it joins goes through one of these.
_GIVES = (
    "self_attn/o_proj/weight", "mlp/down_proj/weight", "embed_proj/2/weight", "markov_head/markov_w2/weight",
)  # fmt: skip
_QUIET = 0.02


def with_start(
    params: Mapping[str, Any], start: Mapping[str, Any], d2t: Int[Array, " Vd"] | None
) -> dict[str, Any]:
    """The parameters of a grown draft: those that it had, and quiet new ones.

    Args:
        params: New ones, all of them.
        start: The draft's that grows.
        d2t: Of the grown draft's vocabulary, whose rows it keeps of a head of all ids.
    """
    had, leaves = flatten(start), {}
    for path, new in flatten(params).items():
        old = had.get(path)
        if old is None:
            leaves[path] = new * _QUIET if path.endswith(_GIVES) else new
        elif old.shape == new.shape:
            leaves[path] = old
        else:
            assert path == "lm_head/weight"
            assert d2t is not None
            leaves[path] = old[target_ids(d2t)]
    return nest(leaves)


def fold_scale(
    params: Mapping[str, Any], scale: Float[Array | np.ndarray, " CD"]
) -> dict[str, Any]:
    """The parameters as a draft that reads raw features: the scale goes into `fc`."""
    return {**params, "fc": {"weight": params["fc"]["weight"] * jnp.asarray(scale)[None]}}
