"""Hugging Face's tensor names and ours: `model.layers.0.mlp.up_proj.weight` is `layers_0/mlp/up_proj/weight`.

Names and shapes are the checkpoint's own, so a conversion copies leaf by leaf; a target's `model.`
prefix is dropped, and flat drafts have none. The exception are experts, whose tensors are stacked.
"""

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from dflash_jax import array_typing as at
from dflash_jax.cache import KVCache
from dflash_jax.checkpoint import values
from dflash_jax.checkpoint.experts import Stacks, split_fused, tensor_shapes
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.models.transformer import Transformer

EMBEDDING, HEAD = "embed_tokens/weight", "lm_head/weight"
# A reduced vocabulary's: the one leaf of integers, and the same as booleans.
OFFSETS, MASK = "d2t", "t2d"
BUFFER = "rotary_emb.inv_freq"  # follows from the config
UNTIED = "lm_head.weight differs from the embedding, but the config has tie_word_embeddings true"
# Where a leaf goes; a function is given its path and shape.
Placement = Sharding | Callable[[str, tuple[int, ...]], Sharding] | None


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
    return name if path == HEAD else prefix + name


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


class Fault(NamedTuple):
    """One thing that is wrong with a checkpoint's tensors.

    Attributes:
        kind: "unknown", "missing", "misshapen", "duplicated", "values", "tied" or "vocabulary".
        name: The tensor's name in the checkpoint.
        said: One line for people.
    """

    kind: str
    name: str
    said: str


@functools.lru_cache(maxsize=8)
def expected_shapes(config: TargetConfig | DraftConfig) -> Mapping[str, tuple[int, ...]]:
    """The shape of every parameter by path, without allocating any."""
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    if isinstance(config, DraftConfig):
        width, Q = config.hidden_size, min(config.block_size, 2)  # no shape depends on it
        x = jax.ShapeDtypeStruct((width, 1, Q), jnp.float32)
        context = jax.ShapeDtypeStruct((len(config.target_layer_ids) * width, 1, Q), jnp.float32)
        anchors = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        init = functools.partial(DFlashDraftModel(config).init, method="every_parameter")
        tree = jax.eval_shape(init, key, x, context, anchors)["params"]
    else:

        def every_parameter(module, tokens):
            c = config
            cache = KVCache.zeros(c.num_hidden_layers, 1, c.num_key_value_heads, 1, c.head_dim, jnp.float32)  # fmt: skip
            return module.logits(module(tokens, cache)[0])

        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        init = functools.partial(Transformer(config).init, method=every_parameter)
        tree = jax.eval_shape(init, key, tokens)["params"]
    return types.MappingProxyType({path: leaf.shape for path, leaf in flatten(tree).items()})


def build(
    leaves: Iterable[tuple[str, Any]], order: Iterable[str], sharding: Placement = None
) -> at.Params:
    """The parameter tree of pairs (path, leaf); beside it, one leaf is held at a time.

    Args:
        sharding: Of numpy leaves; JAX's are where they are.
    """
    tree = {path: _put(path, leaf, sharding) for path, leaf in leaves}
    return nest({path: tree[path] for path in order})


def sharding_of(path: str, shape: tuple[int, ...], placement: Placement) -> Sharding | None:
    """Where a leaf goes; None is the first device."""
    return placement(path, shape) if callable(placement) else placement


def _put(path: str, leaf: Any, placement: Placement) -> jax.Array:
    place = sharding_of(path, leaf.shape, placement)
    if isinstance(leaf, jax.Array):
        return leaf
    if place is None:
        # Not `asarray`, which compiles a program for every shape and copies twice.
        return jax.device_put(leaf, may_alias=False)
    # Each process puts its own part.
    return jax.make_array_from_callback(leaf.shape, place, lambda index: leaf[index])


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
    audit = Audit(shapes, tied=is_tied(expected))
    for name, value in split_fused(tensors):
        path = path_of(name)
        if not name.endswith(BUFFER) and audit.accepts(name, path, value):
            kept = np.int32 if path == OFFSETS else value.dtype if dtype is None else dtype
            whole = stacks.add(path, value.astype(kept, copy=False))
            if whole is not None and not audit.problems:
                yield whole
            del whole
        del value  # the next is read before it would be
    audit.refuse(source, lambda path: name_of(path, prefix_of(expected)))


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
            if config.draft_vocab_size is not None and path_of(name) == MASK:
                masks.append(value)
            else:
                yield name, value
            del value

    offsets = np.empty(0, int)
    for path, leaf in stream(others(), expected_shapes(config), source, dtype):
        if path == OFFSETS:
            offsets = leaf
        yield path, leaf
        del leaf
    if config.draft_vocab_size is not None:
        refuse(source, vocabulary_faults(config, offsets, *masks))


def find_faults(
    tensors: Iterable[tuple[str, np.ndarray]],
    config: TargetConfig | DraftConfig,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> list[Fault]:
    """What `stream` or `stream_draft` refuses, one tensor held at a time.

    Args:
        shapes: Of the tensors by path, where they are not a Hugging Face checkpoint's.
    """
    expected = expected_shapes(config)
    audit = Audit(tensor_shapes(expected) if shapes is None else shapes, tied=is_tied(expected))
    ids: dict[str, np.ndarray] = {}
    for name, value in split_fused(tensors):
        path = path_of(name)
        if path in (OFFSETS, MASK):
            ids[path] = value
        if not name.endswith(BUFFER) and not (path == MASK and OFFSETS in expected):
            audit.accepts(name, path, value)
    faults = audit.finish(lambda path: name_of(path, prefix_of(expected)))
    if isinstance(config, DraftConfig) and OFFSETS in ids and OFFSETS in expected and not faults:
        masks = [ids[MASK]] if MASK in ids else []
        faults = vocabulary_faults(config, ids[OFFSETS], *masks)
    return faults


def vocabulary_faults(
    config: DraftConfig, offsets: Any, mask: np.ndarray | None = None
) -> list[Fault]:
    """What is wrong with a reduced vocabulary's `d2t` (`offsets`), and with its `t2d` (`mask`) if given.

    Row i of the draft's head is for the target's id `i + d2t[i]`.
    """
    ids = np.arange(len(offsets)) + np.asarray(offsets).astype(np.int64)
    if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= config.vocab_size:
        said = f"i + d2t[i] must be ascending ids in [0, {config.vocab_size})"
        return [Fault("vocabulary", OFFSETS, said)]
    if mask is not None and (
        mask.shape != (config.vocab_size,) or not np.array_equal(np.flatnonzero(mask), ids)
    ):
        return [Fault("vocabulary", MASK, "t2d and d2t name different ids")]
    return []


def own_tensors(config: DraftConfig, names: Iterable[str]) -> DraftConfig:
    """The config with `own_head` and `own_embedding` as a checkpoint's tensor names have it.

    Never by comparing sizes: a head of the target's size may be the draft's own.
    """
    paths = {path_of(name) for name in names}
    return dataclasses.replace(config, own_head=HEAD in paths, own_embedding=EMBEDDING in paths)


def check_params(params: at.Params, config: TargetConfig | DraftConfig, source: object) -> None:
    """Raises `stream`'s ValueError for a tree that is not `config`'s."""
    for _ in checked(flatten(params).items(), config, source):
        pass


def checked(
    leaves: Iterable[tuple[str, Any]],
    config: TargetConfig | DraftConfig,
    source: object,
    name: Callable[[str], str] = str,
) -> Iterator[tuple[str, Any]]:
    """Yields the pairs (path, leaf) as they are; raises `stream`'s ValueError if they are not `config`'s.

    Args:
        name: Of a path, in the checkpoint.
    """
    audit = Audit(expected_shapes(config))
    for path, leaf in leaves:
        if (
            audit.accepts(name(path), path, leaf)
            and path == OFFSETS
            and isinstance(config, DraftConfig)
        ):
            refuse(source, vocabulary_faults(config, leaf))
        if not audit.problems:
            yield path, leaf
        del leaf
    audit.refuse(source)


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], source: object
) -> None:
    """Raises one ValueError for all shapes that are unknown, missing, or unlike the expected ones."""
    audit = Audit(expected)
    for path, shape in shapes.items():
        audit.fits(path, path, shape)
    audit.refuse(source)


def prefix_of(expected: Mapping[str, tuple[int, ...]]) -> str:
    """What stands before the names in a checkpoint of these leaves: drafts have nothing there."""
    return "" if "fc/weight" in expected else "model."


def is_tied(expected: Mapping[str, tuple[int, ...]]) -> bool:
    return EMBEDDING in expected and HEAD not in expected


@dataclasses.dataclass
class Audit:
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
    problems: list[Fault] = dataclasses.field(default_factory=list)
    digests: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def accepts(self, name: str, path: str, value: Any) -> bool:
        """Whether the tree takes this tensor; if not, the reason is noted."""
        if self.tied and path in (EMBEDDING, HEAD) and path not in self.digests:
            self.digests[path] = values.digest(value)
            if path == HEAD:
                return False
        if not self.fits(name, path, value.shape):
            return False
        return self.holds(
            name, value, values.integer_fault if path == OFFSETS else values.value_fault
        )

    def holds(self, name: str, value: Any, fault_of: Callable[[Any], str | None]) -> bool:
        fault = fault_of(value)
        if fault:
            self.problems.append(Fault("values", name, f"{name} {list(value.shape)} {fault}"))
        return not fault

    def fits(self, name: str, path: str, shape: tuple[int, ...]) -> bool:
        found, wanted = list(shape), self.expected.get(path)

        def note(kind: str, more: str = "") -> None:
            self.problems.append(Fault(kind, name, f"{kind} {name} {found}{more}"))

        if wanted is None:
            note("unknown")
        elif path in self.seen:
            note("duplicated", f", also given as {self.seen[path]}")
        elif found != list(wanted):
            note("misshapen", f", expected {list(wanted)}")
        if wanted is None or path in self.seen:
            return False
        self.seen[path] = name
        return found == list(wanted)

    def finish(self, name: Callable[[str], str] = str) -> list[Fault]:
        """All that is wrong, with missing tensors under the `name` of their path."""
        if HEAD in self.digests and self.digests[HEAD] != self.digests.get(EMBEDDING):
            self.problems.append(Fault("tied", "lm_head.weight", UNTIED))
        absent = [path for path in self.expected if path not in self.seen]
        self.problems += [
            Fault("missing", name(p), f"missing {name(p)} {list(self.expected[p])}") for p in absent
        ]
        return self.problems

    def refuse(self, source: object, name: Callable[[str], str] = str) -> None:
        """Raises ValueError for `finish`'s faults; where tensors are missing, what there is may be them."""
        faults, there = self.finish(name), ""
        if any(fault.kind == "missing" for fault in faults):
            others = sorted(name for name in self.seen.values() if "layers" not in name)
            there = f"; outside its layers there are {', '.join(others) or 'no tensors'}"
        refuse(source, faults, f"{len(faults)} tensors at fault: ", there)


def refuse(source: object, faults: list[Fault], before: str = "", after: str = "") -> None:
    """Raises one ValueError for the faults, if there are any."""
    if faults:
        said = "; ".join(" ".join(fault.said.split()) for fault in faults)
        raise ValueError(f"{source}: {before}{said}{after}")
