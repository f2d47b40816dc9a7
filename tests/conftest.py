"""Settings for all tests: property tests know no wall-clock deadline, and CI draws the same examples each time."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


OTHER_MARKERS = {"mooncake", "vllm", "sim", "bench", "npu", "cuda", "browser", "prometheus", "release", "docs"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test without a marker of its own is a unit test."""
    for item in items:
        if not OTHER_MARKERS & {mark.name for mark in item.iter_markers()}:
            item.add_marker("unit")
