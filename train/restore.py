"""The draft of a training checkpoint, without the optimizer's state.

    python -m train.restore RUN DEST [--step N]

A run exports its best draft by itself; this writes that of any checkpoint which is still there.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from dflash_jax.checkpoint import keys, orbax
from dflash_jax.checkpoint.export import save_draft
from dflash_jax.config import DraftConfig
from dflash_jax.pair import Draft
from train.warm_start import fold_scale

_PARAMS, _SCALE = "params/", "feature_scale"  # of step.TrainState


def read_draft(run: str | Path, step: int | None = None) -> Draft:
    """The float32 draft of a run's checkpoint, on the first device; the optimizer's state is not read.

    Args:
        run: The run's folder.
        step: None is the latest.

    Raises:
        ValueError: If the run has no such checkpoint, or it is not readable.
    """
    folder = Path(run) / "checkpoints"
    steps = sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())
    if not steps or step not in (None, *steps):
        raise ValueError(f"{folder} has checkpoints of the steps {steps}, not {step=}")
    folder = folder / str(steps[-1] if step is None else step)
    stored = orbax.read_shapes(folder)
    wanted = {p: x for p, x in stored.items() if p.startswith(_PARAMS) or p == _SCALE}
    metadata: Any = ocp.metadata(str(folder.absolute())).custom_metadata
    try:
        config = orbax.config_of(DraftConfig, metadata["draft"])
        leaves = dict(orbax.read_leaves(folder, wanted))
        scale = leaves.pop(_SCALE)
    except (KeyError, TypeError) as e:
        raise ValueError(f"{folder} is no checkpoint of a draft's training: it lacks {e}") from e
    own = {path.removeprefix(_PARAMS): leaf for path, leaf in leaves.items()}
    params = keys.build(keys.checked(own.items(), config, folder), own)
    return Draft(config, fold_scale(params, scale), folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.restore", description=__doc__.splitlines()[0])  # fmt: skip
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a training run")
    parser.add_argument(
        "destination", metavar="DEST", type=Path, help="Hugging Face folder to make"
    )
    parser.add_argument("--step", type=int, help="default: the latest")
    args = parser.parse_args(argv)
    try:
        draft = read_draft(args.run, args.step)
        save_draft(args.destination, draft.config, draft.params)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
