"""Where arrays lie on a mesh: the table from a parameter's path to its PartitionSpec. Nothing else knows a mesh.

A mesh has three axes: `data` and `fsdp` divide a batch, `fsdp` also what is trained, and `model` the
matrices, the heads and the vocabulary. An axis of length 1 is one that is not used.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from dflash_jax.cache import KVCache
from dflash_jax.config import TransformerConfig

AXES = ("data", "fsdp", "model")
Tree = TypeVar("Tree")
Axis = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Rules:
    """Where the arrays of a tree lie.

    Attributes:
        table: Pairs of a pattern, searched for in an array's path (`layers_0/mlp/up_proj/weight`), and
            the mesh axes of its leading dimensions. The first one found holds; without any, an array
            is on every device.
        largest: Mesh axis of a matrix's largest dimension that has none by the table.
        head_dim: Rows of attention weights that are kept together: a head that is split costs a dozen
            exchanges a layer.
    """

    table: tuple[tuple[str, tuple[Axis, ...]], ...]
    largest: str | None = None
    head_dim: int = 1

    def of(self, config: TransformerConfig) -> "Rules":
        """The rules for a model of this config."""
        return dataclasses.replace(self, head_dim=config.head_dim)


# Weights are [out, in]. A product's own result is divided by its heads, features or ids, the next
# one sums over them; a router is on every device, its experts are not.
_TENSOR = (
    (r"\bexperts/", ("model",)),
    (r"\b(q|k|v|gate|up)_proj/(weight|bias|scale)$", ("model",)),
    (r"\b(o|down)_proj/weight$", (None, "model")),
    (r"\b(embed_tokens|lm_head)/(weight|scale)$", ("model",)),
    (r"_codebook$", ("model",)),
    (r"^fc/weight$|/fc/weight$", ("model",)),
)
TARGET = Rules(_TENSOR)
# The optimizer's moments lie under the same paths. Norms, biases and counts are on every device.
DRAFT = Rules(_TENSOR, largest="fsdp")
BATCH = Rules((("", (("data", "fsdp"),)),))  # every array by its rows
# Keys and values by rows and heads; the rest of a decoder's state is small, and read by every process.
CACHE = Rules(((r"\b(k|v)/", (("data", "fsdp"), "model")),))
# Hidden states `[D, B, T]`, whole and as a divided product leaves them; and logits by ids last, `[B, T, V]`.
STATES = Rules((("", (None, ("data", "fsdp"))),))
FEATURES = Rules((("", ("model", ("data", "fsdp"))),))
LOGITS = Rules((("", (("data", "fsdp"), None, "model")),))
VOCABULARY = Rules((("", ("model",)),))  # a part of a head, by its ids
EVERYWHERE = Rules(())


def make_mesh(
    lengths: Mapping[str, int] | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of all devices, or of those given.

    Args:
        lengths: Devices along the axes; 1 where not given.

    Raises:
        ValueError: If an axis is unknown, or their product is not the number of devices.
    """
    shape = {axis: 1 for axis in AXES} | dict(lengths or {})
    if len(shape) > len(AXES):
        raise ValueError(f"mesh={shape} must have no other axes than {list(AXES)}")
    devices = jax.devices() if devices is None else devices
    if math.prod(shape.values()) != len(devices):
        raise ValueError(
            f"mesh={shape} is of {math.prod(shape.values())} devices, but there are {len(devices)}"
        )
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(shape.values()), AXES, types, devices=devices)


def spec_of(
    path: str, shape: Sequence[int], mesh: Mesh | AbstractMesh, rules: Rules
) -> PartitionSpec:
    """Where the array of this path and shape lies.

    A dimension that its axes do not divide loses them, the last one first; at worst it is whole on
    every device.
    """
    axes = next((axes for pattern, axes in rules.table if re.search(pattern, path)), ())
    axes = [*axes, *[None] * len(shape)][: len(shape)]
    unit = rules.head_dim if "self_attn/" in path else 1
    found = [
        _dividing(axis, size // unit if size % unit == 0 else size, mesh)
        for axis, size in zip(axes, shape)
    ]
    if rules.largest is not None and len(shape) > 1:
        free = [i for i, axis in enumerate(found) if axis is None and _dividing(rules.largest, shape[i], mesh)]  # fmt: skip
        if free:
            found[max(free, key=lambda i: shape[i])] = rules.largest
    while found and found[-1] is None:  # JAX's own form, so that a step's output is its next input
        found.pop()
    return PartitionSpec(*found)


def _dividing(axis: Axis, size: int, mesh: Mesh | AbstractMesh) -> Axis:
    names = (axis,) if isinstance(axis, str) else axis or ()
    while names and size % math.prod(mesh.shape[name] for name in names):
        names = names[:-1]
    return (names[0] if len(names) == 1 else names) or None


def placement(
    mesh: Mesh | AbstractMesh, rules: Rules
) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """The sharding of each array by its path and shape, as `checkpoint.orbax.load` takes it."""
    return lambda path, shape: NamedSharding(mesh, spec_of(path, shape, mesh, rules))


def shardings(tree: Tree, mesh: Mesh | AbstractMesh, rules: Rules) -> Tree:
    """The tree's shardings, a leaf each."""
    place = placement(mesh, rules)
    return jax.tree.map_with_path(lambda path, x: place(_name(path), x.shape), tree)


def shard(tree: Tree, mesh: Mesh, rules: Rules) -> Tree:
    """The tree on the mesh.

    Args:
        tree: Of arrays that every process has whole, or that are on the mesh already.
    """

    def put(x: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable or not _is_here(x):
            return jax.device_put(x, sharding)
        whole = np.asarray(x)  # each process puts its own part, without asking the others
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(put, tree, shardings(tree, mesh, rules))


def place(tree: Tree, rules: Rules) -> Tree:
    """`shard` on the mesh of `jax.set_mesh`; without one, the tree as it is."""
    if jax.sharding.get_abstract_mesh().empty:  # inside jit too, where only shapes are asked for
        return tree
    return shard(tree, jax.sharding.get_mesh(), rules)


def place_parts(
    shape: tuple[int, ...], read: Callable[[Any], np.ndarray], rules: Rules
) -> jax.Array:
    """`place` of an array that every process reads its own parts of, as `read` gives them by index."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jnp.asarray(read((slice(None),) * len(shape)))
    sharding = NamedSharding(mesh, spec_of("", shape, mesh, rules))
    return jax.make_array_from_callback(shape, sharding, read)


def gathered(tree: Tree) -> Tree:
    """The tree with the arrays that lie on other processes too gathered into numpy ones; all must call it."""
    return jax.tree.map(lambda x: x if _is_here(x) else _gathered(x), tree)


def constrain(tree: Tree, rules: Rules) -> Tree:
    """`shard` inside jit, on the mesh of `jax.set_mesh`; without one, the tree as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh, rules))


def gather_features(x: jax.Array) -> jax.Array:
    """A divided product's result `[D, B, T]`, inside jit, with all its features on every device.

    Left divided, every sum over them behind it would be divided too; asked for whole alone, XLA gathers
    the product's weights instead. Of several processes XLA places it, as in `keep`.
    """
    if jax.process_count() > 1:
        return x
    return constrain(constrain(x, FEATURES), STATES)


def keep(cache: KVCache) -> KVCache:
    """A cache where `CACHE` lays it, inside jit; of several processes XLA places it (see `states`)."""
    if jax.process_count() > 1:
        return cache
    return cache.replace(**constrain({"k": cache.k, "v": cache.v}, CACHE))


def top_k(
    x: Float[Array, "B T X"], count: int
) -> tuple[Float[Array, "B T {count}"], Int[Array, "B T {count}"]]:
    """`jax.lax.top_k` inside jit: of each device's own rows and ids, then of what they found.

    XLA's partitioner would gather all rows and ids on every device; of several processes, each of which
    reads the results of all rows, that is what is wanted.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or jax.process_count() > 1:
        values, ids = jax.lax.top_k(x, count)
        return values, ids
    spec = spec_of("", x.shape, mesh, LOGITS)
    rows, whole = PartitionSpec(*spec[:1]), len(spec) < 3 or mesh.shape["model"] == 1

    def local(part):
        values, ids = jax.lax.top_k(part, min(count, part.shape[2]))
        if whole:
            return values, ids
        ids = ids + part.shape[2] * jax.lax.axis_index("model")
        values, ids = (jax.lax.all_gather(y, "model", axis=2, tiled=True) for y in (values, ids))
        values, at = jax.lax.top_k(values, count)  # of equal ones the first, here too
        return values, jnp.take_along_axis(ids, at, axis=2)

    return jax.shard_map(local, in_specs=spec, out_specs=rows, check_vma=False)(x)


def parts_of(size: int, rules: Rules) -> int:
    """Into how many parts the mesh of `jax.set_mesh` divides an array's first dimension; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    spec = spec_of("", (size,), mesh, rules)
    axes = spec[0] if len(spec) else ()
    return math.prod(
        mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ())
    )


def _is_here(x: Any) -> bool:
    return getattr(x, "is_fully_addressable", True)


def _gathered(x: jax.Array) -> np.ndarray:
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"{sharding=} is not of a mesh")
    return np.asarray(jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec())))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
