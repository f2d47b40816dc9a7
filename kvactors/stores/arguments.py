"""What every store checks of its callers' arguments: a call that is malformed as a whole raises, and changes nothing."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvactors.core.answers import shown
from kvactors.core.store import Addresses, RangeBatch
from kvactors.errors import StoreError


def paired(keys: Sequence[str], sizes: Iterable[int]) -> list[int]:
    """The sizes as whole numbers. StoreError unless keys are texts, sizes are whole numbers, and there is one for each key."""
    if isinstance(keys, str):
        raise StoreError(f"keys is {shown(keys)}; give a list of texts")
    if not all(isinstance(key, str) for key in keys):
        at = next(i for i, key in enumerate(keys) if not isinstance(key, str))
        raise StoreError(f"item {at} of keys is {shown(keys[at])}; give a list of texts")
    try:
        nbytes = [operator.index(size) for size in sizes]
    except TypeError as error:
        raise StoreError(f"sizes: {error}; give a whole number of bytes for each key") from error
    if len(nbytes) != len(keys):
        raise StoreError(f"{len(keys)} keys but {len(nbytes)} sizes; give one size per key")
    return nbytes


_ARRAY: type[npt.NDArray[Any]] = np.ndarray
_INT64 = np.dtype(np.int64)


def _well_shaped(addresses: Addresses, sizes: Addresses, offsets: Addresses, keys: int) -> bool:
    """The usual case, told in a microsecond."""
    if type(addresses) is not _ARRAY or type(sizes) is not _ARRAY or type(offsets) is not _ARRAY:
        return False
    shape = sizes.shape
    same = offsets.shape == shape and addresses.shape == (keys, *shape) and len(shape) == 1
    return same and addresses.dtype is _INT64 and sizes.dtype is _INT64 and offsets.dtype is _INT64


def check_shapes(batch: RangeBatch) -> None:
    """StoreError unless the batch's arrays have the shapes and the type that `RangeBatch` names."""
    if _well_shaped(batch.addresses, batch.sizes, batch.offsets, len(batch.keys)):
        return
    if not all(isinstance(a, np.ndarray) for a in (batch.addresses, batch.sizes, batch.offsets)):
        raise StoreError("addresses, sizes and offsets of a batch must be numpy arrays")
    n, r = len(batch.keys), len(batch.sizes)
    arrays: tuple[npt.NDArray[Any], ...] = (batch.addresses, batch.sizes, batch.offsets)
    if batch.addresses.shape != (n, r) or batch.offsets.shape != (r,) or batch.sizes.shape != (r,):
        raise StoreError(
            f"a batch of {n} keys and {r} sizes needs addresses of shape ({n}, {r}) and offsets of shape ({r},), "
            f"not {batch.addresses.shape} and {batch.offsets.shape}"
        )
    if any(array.dtype != np.int64 for array in arrays):
        raise StoreError("addresses, sizes and offsets of a batch must be int64")
