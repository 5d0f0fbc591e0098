"""A command on a machine whose connection to its bucket is slow, or loses writes. A program:

    python tests/bucket_machine.py '{"slow": 0.1, "step": 0.3, "lost": 0.2, "failed": 0.1}' train --gin_file=...

`lease` are seconds until a silent machine loses its lease, 6 by default, `slow` seconds that each upload takes, `slow_at` the only
address with such uploads, `step` seconds that each update takes longer, `lost` the share of uploads that the bucket confirms and
forgets, `failed` the share that it refuses as if the network were gone.
"""

import hashlib
import json
import random
import sys
import time

from de_jax import cli
from de_jax.files import buckets, leases, mirrors
from de_jax.training.run.checkpoint import SaveCheckpoints


def main():
    faults = json.loads(sys.argv[1])
    rng, put = random.Random(0), buckets.Objects.put
    leases.LEASE_SECONDS = faults.get("lease", 6.0)
    leases.BEAT_SECONDS, leases.LOOK_SECONDS = 1.0, 0.5
    mirrors.SYNC_SECONDS, mirrors.LAST_SECONDS = 0.5, 120.0

    def put_or_not(self, name, path):
        if faults.get("slow_at", self.address) == self.address:
            time.sleep(faults.get("slow", 0))
        draw = rng.random()
        if draw < faults.get("failed", 0):
            raise buckets.Unreachable(f"{self.address} cannot be reached (a test); check the network.")
        if draw < faults.get("failed", 0) + faults.get("lost", 0):
            return buckets.Sent(path.stat().st_size, hashlib.md5(path.read_bytes()).hexdigest())
        return put(self, name, path)

    def slowly(self, *given):
        time.sleep(faults.get("step", 0))
        return save(self, *given)

    buckets.Objects.put = put_or_not
    save, SaveCheckpoints.__call__ = SaveCheckpoints.__call__, slowly
    sys.argv = ["de-jax", *sys.argv[2:]]
    cli.main()


if __name__ == "__main__":
    main()
