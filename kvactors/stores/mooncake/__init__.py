"""A Mooncake store as a `Store`: a guarded client, typed answers, coalesced ranges, and a master of one's own for one machine.

What a real Mooncake does, and what of it this package has to make up for, is in docs/design/mooncake.md.
"""

from kvactors.stores.mooncake.config import MooncakeConfig
from kvactors.stores.mooncake.master import LocalMaster
from kvactors.stores.mooncake.store import MooncakeStore

__all__ = ["LocalMaster", "MooncakeConfig", "MooncakeStore"]
