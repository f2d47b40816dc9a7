"""Which ranges lie in registered memory: to the byte, for few ranges and for many, in one region and in several."""

from __future__ import annotations

import numpy as np
import pytest

from kvactors.stores.copying import LOWEST
from kvactors.stores.regions import Regions

BASE, MANY = LOWEST + 4096, 500


@pytest.mark.parametrize("rows", [1, MANY])
@pytest.mark.parametrize("regions", [[(0, 100)], [(0, 100), (5000, 8)], [(0, 60), (60, 40)]])
def test_a_range_may_fill_a_region_to_its_last_byte(regions: list[tuple[int, int]], rows: int) -> None:
    registered = Regions()
    for start, nbytes in regions:
        registered = registered.with_region(BASE + start, nbytes)
    sizes = np.array([60, 40])
    for first, second, good in ((0, 60, True), (-1, 60, False), (0, 61, False), (40, 59, True)):
        addresses = np.array([[BASE + first, BASE + second]] * rows)
        assert registered.cover(addresses, sizes).tolist() == [good] * rows, (first, second)
