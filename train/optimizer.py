"""The optimiser that a recipe names, its schedule, and the average of the parameters that it keeps."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from train.config import TrainConfig

Schedule = Callable[[Any], Any]
_matrices = functools.partial(jax.tree.map, lambda x: x.ndim > 1)  # norms and biases do not decay


def make_schedule(config: TrainConfig) -> Schedule:
    """The learning rate of each update (from 0): a linear warm-up to its peak, then the recipe's shape.

    "cosine" and "linear" reach `final_rate` times the peak at the last step; "constant" stays.
    """
    peak, after = config.learning_rate, config.steps - config.warmup
    shapes: dict[str, Schedule] = {
        "cosine": optax.cosine_decay_schedule(peak, after, config.final_rate),
        "linear": optax.linear_schedule(peak, peak * config.final_rate, after),
        "constant": optax.constant_schedule(peak),
    }
    warm = optax.linear_schedule(0.0, peak, config.warmup)
    return optax.join_schedules([warm, shapes[config.schedule]], [config.warmup])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping, the recipe's optimiser, and the parameters' average where `ema` asks for one."""
    clip = optax.clip_by_global_norm(config.clip)
    rule = _OPTIMIZERS[config.optimizer](config, make_schedule(config))
    if not config.ema:
        return optax.chain(clip, rule)
    average = keep_average(config.ema)
    # Named, so that a checkpoint's average has a path by which it is read alone.
    return optax.named_chain(("clip", clip), ("rule", rule), ("behind", average))


def _adamw(config: TrainConfig, schedule: Schedule) -> optax.GradientTransformation:
    return optax.adamw(
        schedule, config.b1, config.b2, weight_decay=config.weight_decay, mask=_matrices
    )


def _muon(config: TrainConfig, schedule: Schedule) -> optax.GradientTransformation:
    """Muon for matrices and AdamW for the rest, with one rate: Muon's updates have the rms of AdamW's.

    Tables with a row a token are no maps between spaces of features: AdamW has them too.

    Source: arXiv 2502.16982, section 2.2; speculators 0.9.0 `split_named_params_for_muon`.
    """

    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, x: "muon" if x.ndim == 2 and not _is_table(path) else "adamw", params
        )

    muon = optax.contrib.muon(
        schedule, beta=config.muon_momentum, weight_decay=config.weight_decay, consistent_rms=0.2
    )
    return optax.partition({"muon": muon, "adamw": _adamw(config, schedule)}, labels)


_OPTIMIZERS = {"adamw": _adamw, "muon": _muon}


def _is_table(path: Any) -> bool:
    """Whether a parameter's rows are a vocabulary's."""
    names = jax.tree_util.keystr(path)
    return any(part in names for part in ("embed_tokens", "lm_head", "codebook", "markov_w"))


class AverageState(NamedTuple):
    """`average`: of the parameters so far; `count`: how many were averaged."""

    count: Int[Array, ""]
    average: Any


def keep_average(decay: float) -> optax.GradientTransformation:
    """Leaves updates as they are and keeps an exponential average of the parameters behind them.

    The decay begins small, so that the first parameters do not weigh for long: at update n it is at
    most (1 + n) / (10 + n), as in TensorFlow's `ExponentialMovingAverage`.
    """

    def init(params):
        return AverageState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.array, params))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("an average of the parameters needs the parameters")
        n = (state.count + 1).astype(jnp.float32)
        weight: Float[Array, ""] = 1 - jnp.minimum(decay, (1 + n) / (10 + n))
        new = optax.apply_updates(params, updates)
        average = optax.incremental_update(new, state.average, weight)
        return updates, AverageState(state.count + 1, average)

    return optax.GradientTransformation(init, update)


def trained_params(params: Any, opt_state: Any) -> Any:
    """What is evaluated and exported: the average where the optimiser keeps one, else the parameters."""
    average = optax.tree.get(opt_state, "average")
    return params if average is None else average
