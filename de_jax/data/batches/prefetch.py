"""Items made in advance by a background thread."""

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")

ITEMS_AHEAD = 2
"""What `prefetch` makes before it is asked for."""


def prefetch(iterator: Iterator[T], *, ahead: int = ITEMS_AHEAD) -> Generator[T]:
    """Yields what `iterator` yields, made up to `ahead` in advance by a background thread.

    An exception of `iterator` is raised here, in its place. Closing the generator ends the thread.
    """
    ready: queue.Queue[tuple[str, object]] = queue.Queue(maxsize=ahead)
    stopped = threading.Event()

    def put(kind: str, value: object) -> None:
        while not stopped.is_set():
            try:
                return ready.put((kind, value), timeout=0.1)
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for item in iterator:
                put("item", item)
                if stopped.is_set():
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value  # type: ignore[misc]
            yield value  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()
