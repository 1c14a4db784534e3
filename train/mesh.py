"""The processes and devices of a run, and which process does what.

Every process runs the same command; all share the run's folder. Process 0 of two, by hand:

    JAX_COORDINATOR_ADDRESS=host0:1234 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 \\
        python -m train.run RECIPE.toml distributed=true mesh='{data=2,fsdp=4}'

Under Slurm, Open MPI, Kubernetes and on Cloud TPUs JAX finds the three by itself.
"""

import os

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from dflash_jax.sharding import make_mesh
from train.config import TrainConfig


def start(config: TrainConfig) -> Mesh:
    """Joins the run's other processes, if it has any, and lays out all devices as the recipe says.

    Must come before anything that asks JAX for a device.

    Raises:
        ValueError: If the mesh is not of as many devices as there are, or the processes do not meet.
    """
    if config.distributed:
        try:
            jax.distributed.initialize(
                num_processes=_number("JAX_NUM_PROCESSES"), process_id=_number("JAX_PROCESS_ID")
            )
        except (ValueError, RuntimeError) as e:
            raise ValueError(f"distributed=true: {e}") from e
    mesh = make_mesh(config.mesh)
    # The CPU's collectives give the first meeting half a minute, and later ones any time.
    wait_for_all("start")
    return mesh


def _number(variable: str) -> int | None:
    """An environment variable's number; JAX itself reads the coordinator's address only."""
    value = os.environ.get(variable)
    return None if value is None else int(value)


def is_first() -> bool:
    """Whether this process is the one that writes what is written once."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns once every process is here; `name` says where that is."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def greatest(number: int | None) -> int | None:
    """The greatest number that any process has; all must ask."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.int32(number or 0)).max()) or None
