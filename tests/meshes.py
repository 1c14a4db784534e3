"""One process of a training run on the tiny target, on as many simulated devices as XLA_FLAGS says.

python tests/meshes.py STORE RECIPE.toml [key=value ...]
"""

import sys
from pathlib import Path

import jax

from train import run
from train.config import read_recipe
from train.mesh import start


def main(store: str, recipe: str, *overrides: str) -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_enable_compilation_cache", False)
    config = read_recipe(Path(recipe), overrides)
    mesh = start(config)
    from runs import set_up_recipe  # has arrays, and so needs the devices

    run.train(set_up_recipe(Path(store), config, mesh))


if __name__ == "__main__":
    main(*sys.argv[1:])
