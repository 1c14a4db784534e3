"""Hugging Face's tensor names and ours: `model.layers.0.mlp.up_proj.weight` is `layers_0/mlp/up_proj/weight`.

Names and shapes are the checkpoint's own, so a conversion copies leaf by leaf; a target's `model.`
prefix is dropped, and flat drafts have none.
"""

import dataclasses
import functools
import hashlib
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from dflash_jax import array_typing as at
from dflash_jax.cache import KVCache
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.models.transformer import Transformer

_EMBEDDING, _HEAD = "embed_tokens/weight", "lm_head/weight"
_BUFFER = "rotary_emb.inv_freq"  # follows from the config
_FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


def path_of(name: str) -> str:
    """Our path of a Hugging Face tensor name, with or without the `model.` prefix.

    Drafts' other spellings: z-lab's own save calls the codebooks `.weight`, older SpecForge puts
    `logit_head.` before the tensors of a head.
    """
    name = name.removeprefix("model.").removeprefix("logit_head.")
    name = re.sub(r"(_codebook)\.weight$", r"\1", name)
    return re.sub(r"^layers\.(\d+)\.", r"layers_\1.", name).replace(".", "/")


def name_of(path: str, prefix: str = "") -> str:
    """Hugging Face's tensor name of our path; a target's `prefix` is `model.`, which the head goes without."""
    name = re.sub(r"^layers_(\d+)/", r"layers.\1/", path).replace("/", ".")
    return name if path == _HEAD else prefix + name


def flatten(params: at.Params) -> dict[str, Any]:
    """The tree's leaves by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {"/".join(str(k.key) for k in path): leaf for path, leaf in leaves}


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of leaves given by path."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


@functools.lru_cache(maxsize=8)
def expected_shapes(config: TargetConfig | DraftConfig) -> Mapping[str, tuple[int, ...]]:
    """The shape of every parameter by path, without allocating any."""
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    if isinstance(config, DraftConfig):
        x = jnp.zeros((config.hidden_size, 1, config.block_size))
        context = jnp.zeros(
            (len(config.target_layer_ids) * config.hidden_size, 1, config.block_size)
        )
        anchors = jnp.zeros((1, 1), jnp.int32)
        draft = DFlashDraftModel(config)
        tree = jax.eval_shape(
            lambda k: draft.init(k, x, context, anchors, method="every_parameter")["params"], key
        )
    else:
        heads, width = config.num_key_value_heads, config.head_dim
        cache = KVCache.zeros(config.num_hidden_layers, 1, heads, 1, width, jnp.float32)
        tokens = jnp.zeros((1, 1), jnp.int32)
        target = Transformer(config)

        def every_parameter(module, tokens, cache):
            return module.logits(module(tokens, cache)[0])

        tree = jax.eval_shape(
            lambda k: target.init(k, tokens, cache, method=every_parameter)["params"], key
        )
    return types.MappingProxyType({path: leaf.shape for path, leaf in flatten(tree).items()})


def assemble(
    tensors: Iterable[tuple[str, np.ndarray]],
    expected: Mapping[str, tuple[int, ...]],
    source: object,
    dtype: DTypeLike | None = None,
) -> at.Params:
    """Builds the parameter tree from a checkpoint's tensors, each used exactly once.

    Leaf by leaf: beside the tree being built, one tensor is held at a time. Rotary buffers are
    dropped, and so is a tied target's `lm_head.weight` if it equals the embedding bit for bit.

    Args:
        tensors: Pairs (Hugging Face name, value).
        expected: Shapes by path, of `expected_shapes`.
        source: Names the checkpoint in errors.
        dtype: Of the result; None keeps each tensor's own.

    Raises:
        ValueError: One for all tensors that are unknown, missing, there twice, or misshapen, hold no
            floats, hold NaN or infinities, or are matrices of zeros.
    """
    audit = _Audit(expected, tied=_EMBEDDING in expected and _HEAD not in expected)
    leaves = {}
    for name, value in tensors:
        path = path_of(name)
        if not name.endswith(_BUFFER) and audit.accepts(name, path, value):
            leaves[path] = jnp.asarray(value if dtype is None else value.astype(dtype, copy=False))
    prefix = "model." if _EMBEDDING in expected else ""
    audit.finish(source, lambda path: name_of(path, prefix))
    return nest({path: leaves[path] for path in expected})


def check_params(params: at.Params, config: TargetConfig | DraftConfig, source: object) -> None:
    """Raises `assemble`'s ValueError for a tree that is not `config`'s."""
    audit = _Audit(expected_shapes(config))
    for path, value in flatten(params).items():
        audit.accepts(path, path, value)
    audit.finish(source)


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], source: object
) -> None:
    """Raises one ValueError for all shapes that are unknown, missing, or unlike the expected ones."""
    audit = _Audit(expected)
    for path, shape in shapes.items():
        audit.fits(path, path, shape)
    audit.finish(source)


@dataclasses.dataclass
class _Audit:
    """What is wrong with a checkpoint's tensors so far.

    Attributes:
        expected: Shapes by path.
        tied: Whether a head equal to the embedding is let pass.
        seen: Name of the tensor that was taken for each path.
        problems: One entry a faulty tensor.
        digests: Of the embedding and the head of a tied target.
    """

    expected: Mapping[str, tuple[int, ...]]
    tied: bool = False
    seen: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    digests: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def accepts(self, name: str, path: str, value: Any) -> bool:
        """Whether the tree takes this tensor; if not, the reason is noted."""
        if self.tied and path in (_EMBEDDING, _HEAD) and path not in self.digests:
            self.digests[path] = _digest(value)
            if path == _HEAD:
                return False
        if not self.fits(name, path, value.shape):
            return False
        fault = _fault(value)
        if fault:
            self.problems.append(f"{name} {list(value.shape)} {fault}")
        return not fault

    def fits(self, name: str, path: str, shape: tuple[int, ...]) -> bool:
        found, wanted = list(shape), self.expected.get(path)
        if wanted is None:
            self.problems.append(f"unknown {name} {found}")
        elif path in self.seen:
            self.problems.append(f"duplicated {name} {found}, also given as {self.seen[path]}")
        elif found != list(wanted):
            self.problems.append(f"misshapen {name} {found}, expected {list(wanted)}")
        if wanted is None or path in self.seen:
            return False
        self.seen[path] = name
        return found == list(wanted)

    def finish(self, source: object, name: Callable[[str], str] = str) -> None:
        """Raises if anything is wrong, with missing tensors under the `name` of their path."""
        if _HEAD in self.digests and self.digests[_HEAD] != self.digests.get(_EMBEDDING):
            self.problems.append(
                "lm_head.weight differs from the embedding, but the config has tie_word_embeddings true"
            )
        absent = [path for path in self.expected if path not in self.seen]
        self.problems += [f"missing {name(p)} {list(self.expected[p])}" for p in absent]
        if self.problems:
            raise ValueError(
                f"{source}: {len(self.problems)} tensors at fault: {'; '.join(self.problems)}"
            )


def _fault(value: Any) -> str | None:
    """What makes an array unusable as a parameter."""
    if value.dtype not in _FLOATS:
        return f"holds {value.dtype}, not floats"
    xp = jnp if isinstance(value, jax.Array) else np  # stays where it is, sharded or not
    if not xp.isfinite(value).all():
        return "holds NaN or infinities"
    if value.ndim > 1 and not value.any():
        return "is all zeros, so it was never initialised"
    return None


def _digest(value: np.ndarray) -> bytes:
    digest = hashlib.sha256(f"{value.dtype}{value.shape}".encode())
    digest.update(np.ascontiguousarray(value).view(np.uint8).data)
    return digest.digest()
