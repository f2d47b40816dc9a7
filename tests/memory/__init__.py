"""Tests of `kvactors.memory`; skipped, all of them, where torch is missing."""

import pytest

pytest.importorskip("torch", reason="kvactors.memory needs torch (pip install 'kvactors[torch]')")
