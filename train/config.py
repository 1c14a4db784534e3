"""A training recipe: one frozen value, read from TOML."""

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from dflash_jax.config import WINDOW_RULES, DFlash2, Domino, DSpark, Head, WindowRule
from dflash_jax.sharding import AXES
from train.chat import Thinking, TooLong, Turns
from train.init import SHAPE, init_config
from train.losses import LOSSES
from train.objective import Objective
from train.prompts import KINDS

HEAD_KINDS: dict[Any, type[Head]] = {"dflash2": DFlash2, "domino": Domino, "dspark": DSpark}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a run; the defaults are those of the embedded draft.

    Attributes:
        run: Folder of the run: responses, checkpoints, metrics and the draft.
        target: Checkpoint of the target; empty for the embedded one.
        data: Files of conversations, texts or answers to train on, see `chat.read_documents`; without any, the target's
            answers to the built prompts.
        too_long, thinking, turns: See `chat.read_documents`; too long is what has over sequence_size tokens.
        packed: Whether several short examples share a row.
        features: "stored": the target's taps are computed once, into the run's folder; "online": by the
            target in each step; else the folder of a store made by `train.features`, which is the data too.
        responses: Shard of earlier responses of the target, whose prompts are not answered again.
        init: Draft to start from, in any readable dialect, which decides the draft's shape; empty for the
            target's last layers.
        seed: Of all that is drawn: prompts, random parameters, the order of the examples, anchors.
        target_layer_ids: Taps.
        prompts: Prompts to build a kind.
        rows, refill, response_size, max_new_tokens: See `regenerate.regenerate`.
        num_hidden_layers, block_size, mask_token_id, layer_types, sliding_window, is_causal, window_rule,
            sample_from_anchor: The draft; see `DraftConfig`. A sliding_window of 0 is none.
        head: The draft's head: its kind, of `HEAD_KINDS`, and its numbers.
        draft_vocab_size: Ids that the draft can propose, the most frequent ones; 0 for all.
        own_embedding, own_head: Whether it trains tables of its own, copied from the target's.
        remat: Computes each layer again in the backward pass, instead of keeping what lies inside.
        mixture: Share of each loss of `losses.LOSSES`.
        temperature: Of the mixture's kl_divergence.
        weights: Of a block's slots, a name in `losses.WEIGHTS`.
        gamma: Decay of the slots' weights, for "decay".
        dpace_alpha: Smoothing of the confidence, for "dpace" and its halves.
        normalize: What divides the weighted sum of the losses, a name in `losses.NORMALIZERS`.
        base_ratio: Of the run, in which the share of Domino's loss without its head falls from 1 to 0.
        selector_weight, selector_missing: DFlash 2's; see `objective.Objective`.
        prefix_base: Blocks show a prefix of l tokens in proportion to prefix_base^l (D2SD; 0.9 there); 0
            shows the anchor alone.
        batch_size: Sequences a step.
        accumulate: Parts that a step's sequences go through one after the other, for less memory.
        anchors: Blocks a sequence.
        sequence_size: Tokens a sequence; longer ones are cut.
        frequent, candidates: Head rows of a step: the frequent ids, and all; without candidates (0) the whole
            vocabulary.
        dtype: Of the operands of a step's products with weights, "float32" or "bfloat16".
        chunk: Rows of blocks that go through the head at a time.
        optimizer: "adamw", or "muon" for the matrices and AdamW for the rest.
        schedule: Of the learning rate behind the warm-up: "cosine" or "linear" to `final_rate` of its peak at
            the last step, or "constant".
        steps, warmup, learning_rate, final_rate, weight_decay, clip, b1, b2: The optimiser and its schedule.
        muon_momentum: Of Muon.
        ema: Decay of the average of the parameters that is evaluated and exported; 0 for the parameters.
        evaluate_every, save_every, log_every: Steps.
        held_out: Files of prompts, see `regenerate.read_prompts`, that the run is evaluated on; the first one decides
            which checkpoint is the best. Without any, those that come with the embedded pair.
        decode_every: Evaluations, of which the last one also decodes held-out prompts; 0 for none.
        decode_prompts: Prompts of each held-out set that are decoded.
        samples: Of those, how many are shown and kept in `samples.jsonl`.
        keep: Latest checkpoints that are kept, beside the best one.
        wandb: Project of Weights & Biases that takes the records too; empty for none.
        mesh: Devices along the axes `data`, `fsdp` and `model` of `dflash_jax.sharding`; 1 where not given.
            Their product must be the number of devices.
        distributed: Whether other processes take part, see `train.mesh`.
    """

    run: str
    target: str = ""
    data: tuple[str, ...] = ()
    too_long: TooLong = "drop"
    thinking: Thinking = "keep"
    turns: Turns = "all"
    packed: bool = False
    features: str = "stored"
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
    layer_types: tuple[str, ...] = ()
    sliding_window: int = 0
    is_causal: bool | None = None
    window_rule: WindowRule = "zlab"
    sample_from_anchor: bool = False
    head: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    draft_vocab_size: int = 0
    own_embedding: bool = False
    own_head: bool = False
    remat: bool = False
    mixture: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"cross_entropy": 1.0})
    temperature: float = 1.0
    weights: str = "decay"
    gamma: float = 4.0
    dpace_alpha: float = 0.5
    normalize: str = "weights"
    base_ratio: float = 0.5
    selector_weight: float = 1.0
    selector_missing: str = "skip"
    prefix_base: float = 0.0
    batch_size: int = 4
    accumulate: int = 1
    anchors: int = 16
    sequence_size: int = 256
    frequent: int = 2304
    candidates: int = 3584
    dtype: str = "float32"
    chunk: int = 512
    optimizer: str = "adamw"
    schedule: str = "cosine"
    steps: int = 6000
    warmup: int = 60
    learning_rate: float = 1.5e-3
    final_rate: float = 0.03
    weight_decay: float = 0.05
    clip: float = 1.0
    b1: float = 0.9
    b2: float = 0.95
    muon_momentum: float = 0.95
    ema: float = 0.0
    held_out: tuple[str, ...] = ()
    evaluate_every: int = 500
    save_every: int = 500
    log_every: int = 50
    decode_every: int = 1
    decode_prompts: int = 16
    samples: int = 2
    keep: int = 2
    wandb: str = ""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    distributed: bool = False

    def __post_init__(self):
        problems = [
            text for f in dataclasses.fields(self) for text in _faults(f, getattr(self, f.name))
        ]
        if problems:
            raise ValueError("; ".join(problems))
        _ = self.objective, self.draft_head  # raise for names that they do not know
        labels = self.batch_size * self.anchors * self.block_size
        if 0 < self.candidates < self.frequent + labels:
            raise ValueError(
                f"{self.candidates=} must be at least {self.frequent=} and a step's {labels} labels"
            )
        ways = math.prod(self.mesh.get(axis, 1) for axis in ("data", "fsdp"))
        if self.batch_size % (self.accumulate * ways):
            raise ValueError(
                f"{self.batch_size=} must be a multiple of {self.accumulate=}"
                + (f" times {ways}, the mesh's data * fsdp" if ways > 1 else "")
            )
        if self.prefix_base and (self.head or self.sample_from_anchor):
            raise ValueError(
                f"{self.prefix_base=} needs a draft without {self.head=} and {self.sample_from_anchor=}"
            )
        if self.warmup >= self.steps:
            raise ValueError(f"{self.warmup=} must be less than {self.steps=}")
        if self.rows % self.refill:
            raise ValueError(f"{self.rows=} must be a multiple of {self.refill=}")
        if self.data and self.features not in ("stored", "online"):
            raise ValueError(f"{self.data=} and {self.features=} both name what to train on")
        if self.max_new_tokens + 1 >= self.response_size:
            raise ValueError(f"{self.response_size=} leaves no room before {self.max_new_tokens=}")
        if self.sequence_size <= self.block_size:
            raise ValueError(f"{self.sequence_size=} must be more than {self.block_size=}")

    @property
    def objective(self) -> Objective:
        return Objective(
            mixture=tuple(sorted(self.mixture.items())), weights=self.weights, gamma=self.gamma,
            alpha=self.dpace_alpha, temperature=self.temperature, normalize=self.normalize,
            base_steps=int(self.base_ratio * self.steps), selector_weight=self.selector_weight,
            selector_missing=self.selector_missing,
        )  # fmt: skip

    @property
    def draft_head(self) -> Head | None:
        """The head's config.

        Raises:
            ValueError: If it is of no known kind, or its numbers are not that kind's.
        """
        if not self.head:
            return None
        numbers = dict(self.head)
        kind = HEAD_KINDS.get(numbers.pop("kind", None))
        if kind is None:
            raise ValueError(f"head={dict(self.head)!r} must have a kind of {sorted(HEAD_KINDS)}")
        try:
            return kind(**numbers)
        except TypeError as e:
            raise ValueError(f"head={dict(self.head)!r}: {e}") from e


# Keys that change what a run tells and keeps, and not what it trains.
FREE = frozenset(
    ("run", "save_every", "evaluate_every", "log_every", "decode_every", "decode_prompts", "samples", "keep", "wandb",
     "mesh", "distributed")
)  # fmt: skip
CHOICES = {
    "dtype": ("float32", "bfloat16"),
    "optimizer": ("adamw", "muon"),
    "schedule": ("cosine", "linear", "constant"),
    "window_rule": WINDOW_RULES,
    "too_long": get_args(TooLong),
    "thinking": get_args(Thinking),
    "turns": get_args(Turns),
}
_LEAST = {
    "seed": 0, "mask_token_id": 0, "warmup": 0, "block_size": 2, "decode_every": 0, "samples": 0, "sliding_window": 0,
    "draft_vocab_size": 0, "candidates": 0,
}  # fmt: skip
_MAY_BE_ZERO = (
    "final_rate", "weight_decay", "b1", "b2", "dpace_alpha", "prefix_base", "muon_momentum", "ema",
    "base_ratio", "selector_weight",
)  # fmt: skip


def _faults(field: dataclasses.Field, value: Any) -> Iterator[str]:
    """What is wrong with a field's value."""
    name, least = field.name, _LEAST.get(field.name, 1)
    if field.type is str and not isinstance(value, str):
        yield f"{name}={value!r} must be a string"
    if field.type is int and (type(value) is not int or value < least):
        yield f"{name}={value!r} must be an integer, at least {least}"
    if name == "seed" and type(value) is int and value >= 2**32:
        yield f"{name}={value!r} must be less than 2**32"
    if field.type is float and not (
        _is_number(value)
        and (value > 0 or (value == 0 and name in _MAY_BE_ZERO))
        and (value < float("inf") or name == "gamma")
    ):
        yield f"{name}={value!r} must be a {'non-negative' if name in _MAY_BE_ZERO else 'positive'} number"
    if name in ("b1", "b2", "muon_momentum", "ema") and _is_number(value) and value >= 1:
        yield f"{name}={value!r} must be less than 1"
    if name == "dpace_alpha" and _is_number(value) and value > 1:
        yield f"{name}={value!r} must be at most 1"
    if name in CHOICES and value not in CHOICES[name]:
        yield f"{name}={value!r} must be {' or '.join(CHOICES[name])}"
    if field.type in (bool, bool | None) and type(value) is not bool and value != field.default:
        yield f"{name}={value!r} must be true or false"
    if name in ("data", "held_out") and not (
        isinstance(value, tuple) and all(isinstance(v, str) for v in value)
    ):
        yield f"{name}={value!r} must be a list of files"
    if name == "layer_types" and not isinstance(value, tuple):
        yield f"{name}={value!r} must be a list, a name a layer"
    if name == "head" and not isinstance(value, Mapping):
        yield f"{name}={value!r} must be a table"
    if name == "target_layer_ids" and not (
        isinstance(value, tuple)
        and value
        and all(type(i) is int and i >= 0 for i in value)
        and len({*value}) == len(value)
    ):
        yield f"{name}={value!r} must be a list of different layers"
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
    """Reads a TOML recipe; what it does not say of the draft's shape comes from its `init`, if it has one.

    Args:
        path: The TOML file.
        overrides: `key=value`, TOML too, where a string needs no quotes. A table replaces the file's as a
            whole, `table.key=value` one entry of it.

    Raises:
        ValueError: For an unreadable file, an unknown or missing key, a value out of bounds, or an
            `init` that cannot be read or has another shape than the recipe says.
    """
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text())
        for item in overrides:
            _override(values, item)
    except (OSError, ValueError) as e:  # ValueError: no TOML, or no UTF-8
        raise ValueError(f"recipe {path}: {e}") from e
    fields = {f.name for f in dataclasses.fields(TrainConfig)}
    if unknown := sorted(values.keys() - fields):
        raise ValueError(
            f"recipe {path}: unknown keys {', '.join(_nearest(k, fields) for k in unknown)}"
        )
    if "run" not in values:
        raise ValueError(f"recipe {path}: run, the folder of the run, is missing")
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    config = TrainConfig(**given)
    if not config.init:
        return config
    start = init_config(given)
    return dataclasses.replace(config, **{k: getattr(start, k) for k in SHAPE})


def _override(values: dict[str, Any], item: str) -> None:
    """Puts a `key=value` in; of `table.key=value` the table's other entries stay, the defaults' too."""
    key, equals, value = item.partition("=")
    if not equals:
        raise ValueError(f"{item!r} is no key=value")
    try:
        given = tomllib.loads(item)
    except tomllib.TOMLDecodeError:  # a shell takes a string's quotes away
        given = tomllib.loads(f"{key} = {json.dumps(value)}")
    if "." in key:
        defaults = TrainConfig(run="")
        for name, part in given.items():
            table = values.get(name, getattr(defaults, name, None))
            if isinstance(table, Mapping) and isinstance(part, Mapping):
                given[name] = {**table, **part}
    values.update(given)


def _nearest(key: str, known: Iterable[str]) -> str:
    """An unknown key, and the known one that it may stand for."""
    near = difflib.get_close_matches(key, known, n=1)
    return f"{key} (did you mean {near[0]}?)" if near else key
