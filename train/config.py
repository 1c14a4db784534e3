"""A training recipe: one frozen value, read from TOML."""

import dataclasses
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.sharding import AXES
from train.losses import LOSSES, Objective
from train.prompts import KINDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a run; the defaults are those of the embedded draft.

    Attributes:
        run: Folder of the run: responses, checkpoints, metrics and the draft.
        target: Checkpoint of the target; empty for the embedded one.
        responses: Shard of earlier responses of the target, whose prompts are not answered again.
        init: Draft to start from, in any readable dialect; empty for the target's last layers.
        target_layer_ids: Taps.
        prompts: Prompts to build a kind.
        rows, refill, response_size, max_new_tokens: See `regenerate.regenerate`.
        num_hidden_layers, block_size, mask_token_id: The draft.
        mixture: Share of each loss of `losses.LOSSES`.
        temperature: Of the mixture's kl_divergence.
        weights: Of a block's slots, a name in `losses.WEIGHTS`.
        gamma: Decay of the slots' weights, for "decay".
        dpace_alpha: Smoothing of the confidence, for "dpace" and its halves.
        normalize: What divides the weighted sum of the losses, a name in `losses.NORMALIZERS`.
        prefix_base: Blocks show a prefix of l tokens in proportion to prefix_base^l (D2SD; 0.9 there); 0
            shows the anchor alone.
        batch_size: Sequences a step.
        anchors: Blocks a sequence.
        sequence_size: Tokens a sequence; longer ones are cut.
        frequent, candidates: Head rows of a step: the frequent ids, and all.
        dtype: Of the operands of a step's products with weights, "float32" or "bfloat16".
        chunk: Rows of blocks that go through the head at a time.
        steps, warmup, learning_rate, final_rate, weight_decay, clip, b1, b2: AdamW and its schedule.
        evaluate_every, save_every: Steps.
        mesh: Devices along the axes `data`, `fsdp` and `model` of `dflash_jax.sharding`; 1 where not given.
            Their product must be the number of devices.
        distributed: Whether other processes take part, see `train.mesh`.
    """

    run: str
    target: str = ""
    responses: str = ""
    init: str = ""
    seed: int = 0
    target_layer_ids: tuple[int, ...] = (1, 8, 14, 20, 27)
    prompts: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"chat": 3200, "math": 1600, "code": 1600}
    )
    rows: int = 128
    refill: int = 16
    response_size: int = 256
    max_new_tokens: int = 160
    num_hidden_layers: int = 2
    block_size: int = 8
    mask_token_id: int = 16
    mixture: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"cross_entropy": 1.0})
    temperature: float = 1.0
    weights: str = "decay"
    gamma: float = 4.0
    dpace_alpha: float = 0.5
    normalize: str = "weights"
    prefix_base: float = 0.0
    batch_size: int = 4
    anchors: int = 16
    sequence_size: int = 256
    frequent: int = 2304
    candidates: int = 3584
    dtype: str = "float32"
    chunk: int = 512
    steps: int = 6000
    warmup: int = 60
    learning_rate: float = 1.5e-3
    final_rate: float = 0.03
    weight_decay: float = 0.05
    clip: float = 1.0
    b1: float = 0.9
    b2: float = 0.95
    evaluate_every: int = 500
    save_every: int = 500
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    distributed: bool = False

    def __post_init__(self):
        problems = [
            text for f in dataclasses.fields(self) for text in _faults(f, getattr(self, f.name))
        ]
        if problems:
            raise ValueError("; ".join(problems))
        _ = self.objective  # raises for names that it does not know
        labels = self.batch_size * self.anchors * self.block_size
        if self.candidates < self.frequent + labels:
            raise ValueError(
                f"{self.candidates=} must be at least {self.frequent=} and a step's {labels} labels"
            )
        if self.warmup >= self.steps:
            raise ValueError(f"{self.warmup=} must be less than {self.steps=}")
        ways = math.prod(self.mesh.get(axis, 1) for axis in ("data", "fsdp"))
        if self.batch_size % ways:
            raise ValueError(
                f"{self.batch_size=} must be a multiple of the mesh's {ways} parts of a batch (data * fsdp)"
            )
        if self.rows % self.refill:
            raise ValueError(f"{self.rows=} must be a multiple of {self.refill=}")

    @property
    def objective(self) -> Objective:
        return Objective(
            mixture=tuple(sorted(self.mixture.items())), weights=self.weights, gamma=self.gamma,
            alpha=self.dpace_alpha, temperature=self.temperature, normalize=self.normalize,
        )  # fmt: skip


_LEAST = {"seed": 0, "mask_token_id": 0, "warmup": 0, "block_size": 2}
_MAY_BE_ZERO = ("final_rate", "weight_decay", "b1", "b2", "dpace_alpha", "prefix_base")


def _faults(field: dataclasses.Field, value: Any) -> Iterator[str]:
    """What is wrong with a field's value."""
    name, least = field.name, _LEAST.get(field.name, 1)
    if field.type is str and not isinstance(value, str):
        yield f"{name}={value!r} must be a string"
    if field.type is int and (type(value) is not int or value < least):
        yield f"{name}={value!r} must be an integer, at least {least}"
    if field.type is float and not (
        _is_number(value)
        and (value > 0 or (value == 0 and name in _MAY_BE_ZERO))
        and (value < float("inf") or name == "gamma")
    ):
        yield f"{name}={value!r} must be a {'non-negative' if name in _MAY_BE_ZERO else 'positive'} number"
    if name in ("b1", "b2") and _is_number(value) and value >= 1:
        yield f"{name}={value!r} must be less than 1"
    if name == "dpace_alpha" and _is_number(value) and value > 1:
        yield f"{name}={value!r} must be at most 1"
    if name == "dtype" and value not in ("float32", "bfloat16"):
        yield f"{name}={value!r} must be float32 or bfloat16"
    if name == "target_layer_ids" and not (
        isinstance(value, tuple) and value and all(type(i) is int and i >= 0 for i in value)
    ):
        yield f"{name}={value!r} must be a list of layers"
    if field.type is bool and type(value) is not bool:
        yield f"{name}={value!r} must be true or false"
    if name == "mesh" and not (
        isinstance(value, Mapping)
        and set(value) <= set(AXES)
        and all(type(v) is int and v >= 1 for v in value.values())
    ):
        yield f"{name}={value!r} must be a table of positive integers with keys of {list(AXES)}"
    for table, known in (("mixture", LOSSES), ("prompts", KINDS)):
        if name == table and not (
            isinstance(value, Mapping) and value and set(value) <= set(known)
        ):
            yield f"{name}={value!r} must be a table with keys of {sorted(known)}"
        elif name == table and not all(
            _is_number(v) and 0 < v < float("inf") for v in value.values()
        ):
            yield f"{name}={dict(value)!r} must hold positive numbers"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads a TOML recipe; `key=value` overrides are TOML too and replace tables as a whole.

    Raises:
        ValueError: For an unreadable file, an unknown or missing key, or a value out of bounds.
    """
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text())
        for item in overrides:
            values.update(tomllib.loads(item if "=" in item else f"{item} = "))
    except (OSError, ValueError) as e:  # ValueError: no TOML, or no UTF-8
        raise ValueError(f"recipe {path}: {e}") from e
    fields = {f.name for f in dataclasses.fields(TrainConfig)}
    unknown = sorted(values.keys() - fields)
    if unknown:
        raise ValueError(f"recipe {path}: unknown keys {', '.join(unknown)}")
    if "run" not in values:
        raise ValueError(f"recipe {path}: run, the folder of the run, is missing")
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return TrainConfig(**given)
