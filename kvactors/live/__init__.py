"""Looking into a running engine from outside: a read-only endpoint on this machine, off by default, and who reads it.

`LiveView` puts a snapshot, stories and Prometheus text behind a unix socket or a loopback port. `kvactors top` and
`kvactors story` read them; so does `curl`. docs/live.md has all of it.
"""

from kvactors.live.address import VARIABLE, Address, live_address
from kvactors.live.view import LiveView, view_of_rank

__all__ = ["VARIABLE", "Address", "LiveView", "live_address", "view_of_rank"]
