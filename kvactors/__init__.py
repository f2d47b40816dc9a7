"""kvactors: KV-cache blocks of hybrid models, moved layer by layer by an asyncio actor engine."""

__version__ = "0.1.0"
