"""What is needed of the loop that actors run on."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from kvactors.actors.loops import new_loop


@pytest.mark.parametrize("turns", [1, 2])
def test_a_cancelled_connection_takes_its_socket_with_it(turns: int) -> None:
    """uvloop before 0.23 closed the descriptor and left its number with the socket, which later closed whoever had it then.

    Args:
        turns: of the loop, until the connection that aiohttp makes of a socket is cancelled; it is there after three.
    """

    async def cancelled() -> int:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, server.getsockname())
            connecting = asyncio.ensure_future(loop.create_connection(asyncio.Protocol, sock=sock))
            for _ in range(turns):
                await asyncio.sleep(0)
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await connecting
            await asyncio.sleep(0)  # asyncio's own loop closes it in its next turn
            return sock.detach()

    with contextlib.closing(new_loop()) as loop:
        assert loop.run_until_complete(cancelled()) == -1
