"""A command on a machine whose connection to its bucket is slow, loses answers, or is gone. A program:

    python tests/bucket_machine.py '{"slow": 0.1, "step": 0.3, "lost": 0.2, "failed": 0.1}' train --gin_file=...

`lease` are seconds until a silent machine is overtaken, 6 by default, `beat` those between two entries of an owner, `slow` those
that each upload takes, `slow_at` the only address with such uploads, `step` seconds that each update takes longer, `lost` the share
of uploads whose answer is lost, so that they are repeated, `failed` the share that it refuses as if the network were gone.
"""

import json
import random
import sys
import time

from de_jax import cli
from de_jax.buckets import copies, objects, owners
from de_jax.training.run.checkpoint import SaveCheckpoints


def main():
    faults = json.loads(sys.argv[1])
    rng, put = random.Random(0), objects.Objects.put
    owners.LEASE_SECONDS, owners.BEAT_SECONDS, owners.LOOK_SECONDS = faults.get("lease", 6.0), faults.get("beat", 1.0), 0.5
    owners.SYNC_SECONDS, copies.LAST_SECONDS, copies.PAUSE_SECONDS = 0.5, 120.0, 0.5

    def put_or_not(self, name, content, *, is_new=False):
        if faults.get("slow_at", self.address) == self.address and not isinstance(content, bytes):
            time.sleep(faults.get("slow", 0))
        draw = rng.random()
        if draw < faults.get("failed", 0):
            raise objects.Unreachable(f"{self.address} cannot be reached (a test); check the network.")
        size = put(self, name, content, is_new=is_new)
        return put(self, name, content, is_new=is_new) if draw > 1 - faults.get("lost", 0) else size

    def slowly(self, *given):
        time.sleep(faults.get("step", 0))
        return save(self, *given)

    objects.Objects.put = put_or_not
    save, SaveCheckpoints.__call__ = SaveCheckpoints.__call__, slowly
    sys.argv = ["de-jax", *sys.argv[2:]]
    cli.main()


if __name__ == "__main__":
    main()
