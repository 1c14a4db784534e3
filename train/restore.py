"""The draft of a training checkpoint, without the optimizer's state.

    python -m train.restore RUN DEST [--step N|best|latest]

A run exports its best draft by itself; this writes that of any checkpoint which is still there.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from dflash_jax import command
from dflash_jax.checkpoint import keys, orbax
from dflash_jax.config import DraftConfig
from dflash_jax.pair import Draft
from train.checkpoints import find_checkpoint
from train.draft import write_draft
from train.warm_start import fold_scale

_PARAMS, _SCALE = "params/", "feature_scale"  # of step.TrainState
_AVERAGE = "opt_state/behind/average/"  # of optimizer.make_optimizer


def read_draft(run: str | Path, step: int | str = "latest") -> Draft:
    """The float32 draft of a run's checkpoint, on the first device; the optimizer's state is not read.

    It has the averaged parameters where the run keeps an average.

    Args:
        run: The run's folder.
        step: A step, "latest" or "best".

    Raises:
        ValueError: If the run has no such checkpoint, or it is not readable.
    """
    folder = find_checkpoint(run, step)
    stored = orbax.read_shapes(folder)
    prefix = _AVERAGE if any(p.startswith(_AVERAGE) for p in stored) else _PARAMS
    wanted = {p: x for p, x in stored.items() if p.startswith(prefix) or p in (_SCALE, "d2t")}
    metadata: Any = ocp.metadata(str(folder.absolute())).custom_metadata
    try:
        config = orbax.config_of(DraftConfig, metadata["draft"])
        leaves = dict(orbax.read_leaves(folder, wanted))
        scale = leaves.pop(_SCALE)
    except (KeyError, TypeError) as e:
        raise ValueError(f"{folder} is no checkpoint of a draft's training: it lacks {e}") from e
    own = {path.removeprefix(prefix): leaf for path, leaf in leaves.items()}
    params = keys.build(keys.checked(own.items(), config, folder), own)
    return Draft(config, fold_scale(params, scale), folder)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.restore", description=__doc__.splitlines()[0], **command.examples("""
            python -m train.restore runs/smollm2 latest-draft
            python -m train.restore runs/smollm2 draft-of-step-4000 --step 4000
        """),
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a training run")
    parser.add_argument("destination", metavar="DEST", type=Path, help="folder to make")
    parser.add_argument(
        "--step",
        type=lambda s: int(s) if s.isdecimal() else s,
        default="latest",
        help="a step, best or latest (default)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)

    def restore() -> int:
        draft = read_draft(args.run, args.step)
        write_draft(args.destination, draft.config, draft.params)
        return 0

    return command.run(restore, "interrupted; nothing was written")


if __name__ == "__main__":
    sys.exit(main())
