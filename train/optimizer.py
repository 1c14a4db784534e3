"""The optimiser that a recipe names."""

import functools

import jax
import optax

from train.config import TrainConfig


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW after clipping, with linear warm-up and cosine decay; norms' weights do not decay."""
    peak = config.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, config.warmup, config.steps, peak * config.final_rate
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule,
            config.b1,
            config.b2,
            weight_decay=config.weight_decay,
            mask=functools.partial(jax.tree.map, lambda x: x.ndim > 1),
        ),
    )
