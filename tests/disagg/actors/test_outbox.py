"""An outbox ends its link, whenever it is closed."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.disagg.links import Link
from kvactors.disagg.memory_links import MemoryNetwork
from kvactors.disagg.outbox import Outbox
from kvactors.disagg.wire import Sent
from kvactors.errors import LinkClosedError
from kvactors.simulate.loop import VirtualLoop
from tests.disagg.actors.rig import on_virtual_time


@pytest.mark.parametrize("begun", [False, True])
@on_virtual_time
async def test_it_ends_its_link(loop: VirtualLoop, begun: bool) -> None:
    """Also before its task has run once: a link that is up and down in one turn of the loop."""
    network, far = MemoryNetwork(), asyncio.Queue[Link]()

    async def serve(link: Link) -> None:
        far.put_nowait(link)
        await asyncio.sleep(100.0)

    network.listen("p", serve)
    outbox = Outbox(await network.connect("p"))
    other = await far.get() if begun else None
    if begun:
        outbox.send(Sent("t"))
        assert other is not None
        assert await other.receive() == Sent("t")
    outbox.close()
    with pytest.raises(LinkClosedError):
        await (other or await far.get()).receive()
    assert loop.now() < 100.0
