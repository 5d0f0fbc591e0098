"""Where the real data of a development machine lies; it is not part of the repository."""

import os
from pathlib import Path

SHARED_DATA = Path(os.environ.get("DE_JAX_DATA") or Path(__file__).parents[1].parent / "shared" / "data")
