"""The engine, with its two faces.

`Engine` lives on the caller's own asyncio loop (harness, tests, simulation). `BlockingEngine` runs one on a thread of its
own, for a synchronous forward pass. Both hand out steps that share all state with the actors through one object, so posting
is an append to a deque, and waiting is a latch.
"""

from kvactors.core.config import EngineConfig
from kvactors.engine.asynchronous import Engine
from kvactors.engine.blocking import BlockingEngine, BlockingStep, Load, PendingHit
from kvactors.engine.steps import Step

__all__ = ["BlockingEngine", "BlockingStep", "Engine", "EngineConfig", "Load", "PendingHit", "Step"]
