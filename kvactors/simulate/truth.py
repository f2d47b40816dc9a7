"""What every byte must be: the content of an object is a function of its key alone."""

from __future__ import annotations

import random
from functools import lru_cache


@lru_cache(maxsize=65536)
def content(key: str, nbytes: int) -> bytes:
    """The only right bytes of an object, the same in every run."""
    return random.Random(key).randbytes(nbytes)
