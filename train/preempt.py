"""Signals that end a run in good order."""

import contextlib
import signal
from collections.abc import Generator

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
    """A signal has ended the run; `number` is the signal's."""

    def __init__(self, number: int, where: str = ""):
        super().__init__(f"interrupted by {signal.Signals(number).name}{where}")
        self.number = number


class Signals:
    """The signal that has come, if one has.

    Attributes:
        number: Its number, or None.
        patient: Whether the run looks at `number` by itself; otherwise `Interrupted` is raised at once.
    """

    def __init__(self):
        self.number: int | None = None
        self.patient = False


@contextlib.contextmanager
def catch_signals() -> Generator[Signals]:
    """Notes the first SIGTERM or SIGINT; a second one ends the process at once. For the main thread."""
    signals = Signals()

    def note(number, frame):
        signals.number = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if not signals.patient:
            raise Interrupted(number)

    before = {each: signal.signal(each, note) for each in SIGNALS}
    try:
        yield signals
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
