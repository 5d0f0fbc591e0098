"""A lock that holds on every machine: the lock of a file here and, where the file is in a mirror, a lease in the bucket.

A lease is an object that its holder writes again every `BEAT_SECONDS`. Whoever wants it watches it for `LEASE_SECONDS`, by its own
clock, and takes it over if it did not change. The object is created on condition that it is absent, which S3 and GCS decide for
all; a takeover is read again after `SETTLE_SECONDS`, so that of two at once the later one has it. A process that could not write
its lease for long finds another owner in it, uploads nothing more, and stops.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from de_jax.files import buckets, mirror_record, mirrors, outputs
from de_jax.files.buckets import Objects
from de_jax.files.mirror import Mirror
from de_jax.files.mirrors import TakenOver
from de_jax.files.reading import parse_json
from de_jax.types import InputError

LEASE_SECONDS, BEAT_SECONDS, LOOK_SECONDS, SETTLE_SECONDS = 60.0, 10.0, 2.0, 1.0


@contextlib.contextmanager
def leased(mirror: Mirror, lease: Lease) -> Iterator[bool]:
    """Holds a lease, without which the mirror uploads nothing; whether this machine was the last to hold it."""
    was_ours = lease.take()
    mirror.guards.append(lease.check)
    try:
        yield was_ours
        mirrors.push_all()
        lease.release(is_all_sent=True)
    except BaseException:
        lease.release(is_all_sent=False)
        raise
    finally:
        mirror.guards.remove(lease.check)


class Lease:
    """A lease of one lock file's address.

    Args:
        path: of the lock file.
        what: its holder is doing.
    """

    def __init__(self, path: Path, what: str) -> None:
        address = buckets.address_of(path)
        assert address is not None
        self._objects, self._what, self._session, self._beat = Objects(address), what, uuid.uuid4().hex, 0
        self._is_told = False
        self._last_session = mirror_record.beside(path, ".session")
        self._stop = threading.Event()
        self._is_lost, self._written_at = False, 0.0
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def take(self) -> bool:
        """Waits until the lease is free or expired; whether this machine was the last to hold it.

        Raises:
            InputError: another process holds it.
        """
        before = self._last_session.read_text().strip() if self._last_session.is_file() else None
        while True:
            found = self._read()
            was_ours = found is not None and found.get("session") == before
            if (found is None and self._create()) or (found is not None and self._overtake(found, was_ours)):
                break
        outputs.make_folder(self._last_session.parent)
        self._last_session.write_text(self._session)
        self._thread.start()
        return was_ours

    def check(self) -> None:
        """Raises `TakenOver` where another process has the lease now."""
        found = self._read()
        self._is_lost |= not self._is_own(found)
        if self._is_lost:
            now = f"{found.get('owner', 'another process')} is {self._what} now" if found else f"another process was {self._what}"
            raise TakenOver(f"{now}, as this process was silent for {LEASE_SECONDS:.0f} s; stop one of them.")

    def release(self, *, is_all_sent: bool) -> None:
        """Frees the lease. Where something was not sent, it says who has that, so that this machine may continue with it."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(InputError):
            self.check()
            if is_all_sent:
                self._objects.remove([""])
            else:
                self._objects.write("", self._body(is_free=True))

    def _create(self) -> bool:
        """Whether the lease is this process's, which found none."""
        if not self._objects.create("", self._body()):
            self._refuse(self._read() or {})
            return False
        self._written_at = time.time()
        return self._is_settled()

    def _overtake(self, found: dict[str, Any], was_ours: bool) -> bool:
        """Whether the lease is this process's, which found another one or its own."""
        if not was_ours and not found.get("is_free") and not self._is_expired(found):
            return False
        self._write()
        return self._is_settled()

    def _is_expired(self, found: dict[str, Any]) -> bool:
        """Whether the holder of a lease was silent for long; False where it has ended."""
        if not self._is_told:
            self._is_told = True
            owner, until = found.get("owner"), f"waiting up to {LEASE_SECONDS:.0f} s, to see whether"
            print(f"{until} {owner} is {self._what} still", file=sys.stderr, flush=True)
        deadline = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            now = self._read()
            if now is None or now.get("is_free"):
                return now is not None
            if now != found:
                self._refuse(now)
                return False
        return True

    def _refuse(self, found: dict[str, Any]) -> None:
        raise InputError(f"{found.get('owner', 'another process')} is {self._what} already; stop it first.")

    def _is_settled(self) -> bool:
        """Whether the lease is this process's a while after it was written."""
        time.sleep(SETTLE_SECONDS)
        found = self._read() or {}
        if found.get("session") != self._session:
            self._refuse(found)
            return False
        return True

    def _keep(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with contextlib.suppress(InputError, OSError):  # the network may come back
                if not self._is_own(self._read()):
                    self._is_lost = True
                    return
                self._write()

    def _is_own(self, found: dict[str, Any] | None) -> bool:
        """Whether a lease is this process's; a missing one is not after a silence, in which others may have had it."""
        if found is None:
            return time.time() - self._written_at <= LEASE_SECONDS  # by the clock on the wall, which goes on where a machine sleeps
        return found.get("session") == self._session

    def _read(self) -> dict[str, Any] | None:
        data = self._objects.read("")
        try:
            return None if data is None else dict(parse_json(data.decode()))
        except (ValueError, TypeError):
            return {}

    def _write(self) -> None:
        self._beat += 1
        self._objects.write("", self._body())
        self._written_at = time.time()

    def _body(self, *, is_free: bool = False) -> bytes:
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        return json.dumps({"owner": owner, "session": self._session, "beat": self._beat, "is_free": is_free}).encode()
