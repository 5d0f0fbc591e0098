"""SIGTERM, from a machine that is taken away, and Ctrl-C: the run saves and ends, and the same command continues it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import jax

from de_jax.training.mesh import distributed


class StopOnSignal:
    """Remembers SIGTERM, and Ctrl-C where that is asked for, so that the run saves after the step that is running and stops.

    Used as a context manager; outside of it the signal has its former meaning. Of several processes it is enough that one gets
    the signal: all stop after the same step. On another thread than the main one, which gets no signals, nothing changes.
    """

    REASON = "SIGTERM"
    INTERRUPTED = "Ctrl-C"

    def __init__(self) -> None:
        self._asked: str | None = None
        self._is_alone = jax.process_count() == 1  # JAX itself listens for the signal where there are several processes
        self._listens = self._is_alone and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> StopOnSignal:
        if self._listens:
            self._former = signal.signal(signal.SIGTERM, self._remember)
        return self

    def __exit__(self, *error: object) -> None:
        if self._listens:
            signal.signal(signal.SIGTERM, self._former)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within, the first Ctrl-C is remembered too, and the second has its former meaning. For a process that is alone.

        Raises:
            KeyboardInterrupt: at the end, if the run stopped for Ctrl-C.
        """
        former = signal.getsignal(signal.SIGINT)
        if not self._listens or former is not signal.default_int_handler:  # someone else decides what Ctrl-C does
            yield
            return

        def remember(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, former)
            self._asked = self._asked or self.INTERRUPTED
            with contextlib.suppress(OSError):  # print may be what this interrupts
                os.write(2, b"\nsaving after this update; Ctrl-C again stops at once.\n")

        signal.signal(signal.SIGINT, remember)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)
        if self._asked == self.INTERRUPTED:
            raise KeyboardInterrupt

    def reason(self, step: int) -> str | None:
        """Why to stop after this update, or None."""
        if self._is_alone:
            return self._asked
        return self.REASON if distributed.sigterm_reached(step) else None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._asked = self.REASON
