"""A bucket in memory with the semantics of S3 and GCS: each request happens at once, and an object can be created if absent.

It stands for fsspec's client of a scheme. `gate` sees each request before it happens, and may raise.
"""

import hashlib
import threading
from pathlib import Path


class Store:
    def __init__(self, objects=(), gate=lambda operation, name: None):
        self.objects = dict(objects)  # path -> bytes
        self.gate, self._turn = gate, threading.Lock()

    def apply(self, operation, name, data=None, mode="overwrite"):
        """The answer to a request."""
        with self._turn:
            if operation == "list":
                found = {path: one for path, one in self.objects.items() if path == name or path.startswith(f"{name}/")}
                return {path: {"type": "file", "size": len(one), "ETag": _etag(one)} for path, one in found.items()}
            if operation == "put":
                if mode == "create" and name in self.objects:
                    raise FileExistsError(name)
                self.objects[name] = data
                return None
            if name not in self.objects:
                raise FileNotFoundError(name)
            return self.objects[name] if operation == "get" else self.objects.pop(name)

    def request(self, operation, name, **given):
        self.gate(operation, name)
        return self.apply(operation, name, **given)

    def invalidate_cache(self):
        pass

    def find(self, place, detail):
        return self.request("list", place)

    def cat_file(self, name):
        return self.request("get", name)

    def get_file(self, name, path):
        Path(path).write_bytes(self.request("get", name))

    def pipe_file(self, name, data, mode="overwrite", chunksize=None):
        self.request("put", name, data=data, mode=mode)

    def put_file(self, path, name, mode="overwrite"):
        self.request("put", name, data=Path(path).read_bytes(), mode=mode)

    def rm_file(self, name):
        self.request("remove", name)


def _etag(data):
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
