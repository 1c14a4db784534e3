"""`python -m train.run` on the tiny target, with signals and deaths on order.

python tests/tiny_run.py STORE RECIPE [key=value ...] [die-in-save=STEP] [signals=STEP:NAME,NAME]
"""

import os
import signal
import sys

import orbax.checkpoint._src.path.atomicity as atomicity
from orbax.checkpoint import v1 as ocp
from runs import set_up_recipe

import train.run


def die_in_save(step: int) -> None:
    """Kills the process after a step's arrays are on disk and before its folder gets its name."""
    real = ocp.training.Checkpointer.save

    def save(self, number, *args, **options):
        if number == step:
            for name in ("AtomicRenameTemporaryPath", "CommitFileTemporaryPath"):
                getattr(atomicity, name).finalize = finalize
        return real(self, number, *args, **options)

    async def finalize(self, *args, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    ocp.training.Checkpointer.save = save


def signal_in(step: int, names: list[str]) -> None:
    """Sends the process signals while a step is in flight."""
    real = train.run.make_step_input

    def make_step_input(setup, number):
        if number == step - 1:
            for name in names:
                os.kill(os.getpid(), signal.Signals[name])
        return real(setup, number)

    train.run.make_step_input = make_step_input


def main(store: str, recipe: str, *options: str) -> int:
    train.run.prepare = lambda config, mesh: set_up_recipe(store, config, mesh)
    for option in options:
        name, _, value = option.partition("=")
        if name == "die-in-save":
            die_in_save(int(value))
        if name == "signals":
            step, _, names = value.partition(":")
            signal_in(int(step), names.split(","))
    orders = ("die-in-save=", "signals=")
    return train.run.main([recipe, *(o for o in options if not o.startswith(orders))])


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
