"""Tests of the operators of gated delta nets. They need nothing of the other tests, and run in a process of their own, too:

    python -m pytest tests/fla --noconftest

so that no other test's initialisation changes what is tested here.
"""

import pytest

pytest.importorskip("torch", reason="kvactors.memory needs torch (pip install 'kvactors[torch]')")
