import pytest
from bucket_store import Store

from de_jax.buckets import copies, objects, owners
from de_jax.files import addresses, outputs


class Machine:
    """One machine with its bucket; `go_to` goes to another machine, or to another process of this one."""

    def __init__(self, monkeypatch, folder):
        self._monkeypatch, self._folder, self.store = monkeypatch, folder, Store()

    def go_to(self, name):
        self._monkeypatch.setenv("DE_JAX_CACHE", str(self._folder / name))
        for state in (copies._fetched, copies.claimed, outputs.COMPLETED):
            state.clear()

    def names(self):
        """The objects, those of the owners aside."""
        return {name.removeprefix("bucket/run/") for name in self.store.objects if "/.owners/" not in name}

    def put(self, files):
        for name, text in files.items():
            self.store.apply("put", f"bucket/run/{name}", text.encode())


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """An empty bucket, on a machine with an empty cache."""
    machine = Machine(monkeypatch, tmp_path)
    monkeypatch.setattr(addresses, "SCHEMES", [*addresses.SCHEMES, "memory"])
    monkeypatch.setattr(objects, "_client", lambda scheme, process: machine.store)
    monkeypatch.setattr(objects, "RETRY_SECONDS", ())
    monkeypatch.setattr(owners, "SYNC_SECONDS", 1000.0)
    monkeypatch.setattr(owners, "BEAT_SECONDS", 1000.0)
    machine.go_to("machine")
    yield machine
    for state in (copies._fetched, copies.claimed, outputs.COMPLETED):
        state.clear()
