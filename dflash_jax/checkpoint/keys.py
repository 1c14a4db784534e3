"""Hugging Face's tensor names and ours: `model.layers.0.mlp.up_proj.weight` is `layers_0/mlp/up_proj/weight`.

Names and shapes are the checkpoint's own, so a conversion copies leaf by leaf; a target's `model.`
prefix is dropped, and flat drafts have none. The exception are experts, whose tensors are stacked.
"""

import dataclasses
import functools
import hashlib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from dflash_jax import array_typing as at
from dflash_jax.cache import KVCache
from dflash_jax.checkpoint.experts import Stacks, split_fused, tensor_shapes, unstack
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.models.transformer import Transformer

_EMBEDDING, _HEAD = "embed_tokens/weight", "lm_head/weight"
OFFSETS = "d2t"  # the one leaf of integers
_BUFFER = "rotary_emb.inv_freq"  # follows from the config
_FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


def path_of(name: str) -> str:
    """Our path of a Hugging Face tensor name, with or without the `model.` prefix.

    Drafts' dialects: z-lab's own `save_pretrained` puts `.weight` behind a codebook's name, and older
    SpecForge `logit_head.` before a head's.
    """
    name = name.removeprefix("model.").removeprefix("logit_head.")
    name = name.removesuffix(".weight") if name.endswith("_codebook.weight") else name
    return re.sub(r"^layers\.(\d+)\.", r"layers_\1.", name).replace(".", "/")


def name_of(path: str, prefix: str = "") -> str:
    """Hugging Face's tensor name of our path; a target's `prefix` is `model.`, which the head goes without."""
    name = re.sub(r"^layers_(\d+)/", r"layers.\1/", path).replace("/", ".")
    return name if path == _HEAD else prefix + name


def tensors(leaves: Iterable[tuple[str, Any]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the tensors (Hugging Face name, array) of pairs (path, leaf): experts one by one."""
    for path, leaf in leaves:
        for part, matrix in unstack(path, leaf):
            yield name_of(part, prefix), matrix
        leaf = matrix = None  # not held while the next is read


def blank(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An array of that shape and dtype with the memory of one element."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def flatten(params: at.Params) -> dict[str, Any]:
    """The tree's leaves by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


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
    """The parameter tree of `stream`'s leaves."""
    return build(stream(tensors, expected, source, dtype), expected)


def build(leaves: Iterable[tuple[str, Any]], order: Iterable[str]) -> at.Params:
    """The parameter tree of pairs (path, leaf); beside it, one leaf is held at a time."""
    tree = {path: jnp.asarray(leaf) for path, leaf in leaves}
    return nest({path: tree[path] for path in order})


def stream(
    tensors: Iterable[tuple[str, np.ndarray]],
    expected: Mapping[str, tuple[int, ...]],
    source: object,
    dtype: DTypeLike | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path, leaf) of a checkpoint's tensors, each used exactly once, in the tensors' order.

    One tensor is held at a time, and the stacks of a layer whose experts are not all read. Rotary
    buffers are dropped, and so is a tied target's `lm_head.weight` if it equals the embedding bit for
    bit. Nothing more is yielded after the first fault, which is raised with all others at the end.

    Args:
        tensors: Pairs (Hugging Face name, value).
        expected: Shapes by path, of `expected_shapes`.
        source: Names the checkpoint in errors.
        dtype: Of the leaves; None keeps each tensor's own.

    Raises:
        ValueError: One for all tensors that are unknown, missing, there twice, or misshapen, hold no
            floats, hold NaN or infinities, or are matrices of zeros.
    """
    shapes, stacks = tensor_shapes(expected), Stacks(expected)
    audit = _Audit(shapes, tied=_EMBEDDING in expected and _HEAD not in expected)
    for name, value in split_fused(tensors):
        path = path_of(name)
        if not name.endswith(_BUFFER) and audit.accepts(name, path, value):
            kept = np.int32 if path == OFFSETS else value.dtype if dtype is None else dtype
            whole = stacks.add(path, value.astype(kept, copy=False))
            if whole is not None and not audit.problems:
                yield whole
            del whole
        del value  # the next is read before it would be
    prefix = "" if "fc/weight" in expected else "model."
    audit.finish(source, lambda path: name_of(path, prefix))


def assemble_draft(
    tensors: Iterable[tuple[str, np.ndarray]],
    config: DraftConfig,
    source: object,
    dtype: DTypeLike | None = None,
) -> at.Params:
    """The parameter tree of `stream_draft`'s leaves."""
    return build(stream_draft(tensors, config, source, dtype), expected_shapes(config))


def stream_draft(
    tensors: Iterable[tuple[str, np.ndarray]],
    config: DraftConfig,
    source: object,
    dtype: DTypeLike | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """`stream` for a draft; a reduced vocabulary's `t2d` must say the same as `d2t`, and is dropped.

    Raises:
        ValueError: As `stream`, and for a `d2t` that names no ascending target ids.
    """
    masks: list[np.ndarray] = []

    def others():
        for name, value in tensors:
            if config.draft_vocab_size is not None and path_of(name) == "t2d":
                masks.append(value)
            else:
                yield name, value
            del value

    ids = np.empty(0, int)
    for path, leaf in stream(others(), expected_shapes(config), source, dtype):
        if path == OFFSETS:
            ids = _target_ids(leaf, config, source)
        yield path, leaf
        del leaf
    if masks:
        told = np.flatnonzero(masks[0])
        if masks[0].shape != (config.vocab_size,) or not np.array_equal(told, ids):
            raise ValueError(f"{source}: t2d and d2t name different ids")


def _target_ids(offsets: Any, config: DraftConfig, source: object) -> np.ndarray:
    """The target's id of each row of a reduced vocabulary's head, of `d2t`.

    Raises:
        ValueError: Unless they ascend.
    """
    ids = np.arange(len(offsets)) + np.asarray(offsets)
    if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise ValueError(f"{source}: i + d2t[i] must be ascending ids in [0, {config.vocab_size})")
    return ids


def own_tensors(config: DraftConfig, names: Iterable[str]) -> DraftConfig:
    """The config with `own_head` and `own_embedding` as a checkpoint's tensor names have it.

    Never by comparing sizes: a head of the target's size may be the draft's own.
    """
    paths = {path_of(name) for name in names}
    return dataclasses.replace(config, own_head=_HEAD in paths, own_embedding=_EMBEDDING in paths)


def check_params(params: at.Params, config: TargetConfig | DraftConfig, source: object) -> None:
    """Raises `stream`'s ValueError for a tree that is not `config`'s."""
    for _ in checked(flatten(params).items(), config, source):
        pass


def checked(
    leaves: Iterable[tuple[str, Any]], config: TargetConfig | DraftConfig, source: object
) -> Iterator[tuple[str, Any]]:
    """Yields the pairs (path, leaf) as they are; raises `stream`'s ValueError if they are not `config`'s."""
    audit = _Audit(expected_shapes(config))
    for path, leaf in leaves:
        if audit.accepts(path, path, leaf) and path == OFFSETS and isinstance(config, DraftConfig):
            _target_ids(leaf, config, source)
        if not audit.problems:
            yield path, leaf
        del leaf
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
        fault = _integer_fault(value) if path == OFFSETS else _fault(value)
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
                + (self.available() if absent else "")
            )

    def available(self) -> str:
        """The names that were taken, those of layers aside: what is missing may go by another name."""
        others = sorted(name for name in self.seen.values() if "layers" not in name)
        return f"; outside its layers there are {', '.join(others) or 'no tensors'}"


def _fault(value: Any) -> str | None:
    """What makes an array unusable as a parameter."""
    if value.dtype not in _FLOATS:
        return f"holds {value.dtype}, not floats"
    if isinstance(value, jax.Array) and not _on_host(value):
        largest = _largest_on_device(value)
    else:
        largest = _largest(np.asarray(value))
    if not np.isfinite(largest):
        return "holds NaN or infinities"
    if value.ndim > 1 and not largest:
        return "is all zeros, so it was never initialised"
    return None


def _largest(value: np.ndarray, size: int = 2**18) -> np.ndarray:
    """The greatest magnitude; NaN is greater than infinity.

    Magnitudes are in the order of their bits, and integers are compared 9 times as fast as bfloat16;
    in pieces that stay in a core's cache.
    """
    kind = np.dtype(f"u{value.dtype.itemsize}")
    bits = np.ascontiguousarray(value).reshape(-1).view(kind)
    magnitude = kind.type(np.iinfo(kind).max >> 1)
    tops = [(bits[i : i + size] & magnitude).max() for i in range(0, len(bits), size)]
    return np.array(max(tops, default=0), kind).view(value.dtype)


def _on_host(value: jax.Array) -> bool:
    """Whether numpy sees the array without a copy."""
    return [device.platform for device in value.devices()] == ["cpu"]


@jax.jit
def _largest_on_device(value: jax.Array) -> jax.Array:
    """`_largest` where the array is, sharded or not."""
    return jnp.max(jnp.abs(value), initial=0)


def _integer_fault(value: Any) -> str | None:
    """What makes an array unusable as ids."""
    if value.dtype not in (np.int32, np.int64):
        return f"holds {value.dtype}, not integers"
    return None


def _digest(value: np.ndarray) -> bytes:
    digest = hashlib.sha256(f"{value.dtype}{value.shape}".encode())
    digest.update(np.ascontiguousarray(value).view(np.uint8).data)
    return digest.digest()
