"""Where a server of the hand-off listens: the checks and the socket, the same for links and for the bootstrap server."""

from __future__ import annotations

import errno
import ipaddress
import socket

from kvactors.errors import ConfigError

IDLE_S, INTERVAL_S, PROBES = 10, 5, 3
"""TCP keepalive: a machine that vanished is noticed 25 s after its last sign of life; a frozen process answers, and is kept."""

_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES),
)


def keep_alive(sock: socket.socket) -> None:
    """Turns TCP keepalive on; the connections that a listening socket accepts inherit it."""
    for level, option, value in _KEEPALIVE:
        sock.setsockopt(level, option, value)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a host; a name other than "localhost" is taken to be reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether a host stands for all addresses of the machine, and is none that a peer could dial."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def check_host(host: str, public: bool, what: str) -> None:
    """Refuses a host that other machines reach, unless that was asked for.

    Raises:
        ConfigError: the host is not of the loopback network, and `public` is not set.
    """
    if not public and not is_loopback(host):
        raise ConfigError(
            f"the {what} would listen on {host!r}, where other machines reach it, and it knows no passwords;"
            " give public=True if only trusted machines do, or host='127.0.0.1'"
        )


def authority(host: str, port: int) -> str:
    """Host and port as they stand in an address; an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening_socket(host: str, port: int, what: str, setting: str) -> socket.socket:
    """A socket that listens on a host and port; port 0 = any that is free. Keepalive is on.

    Args:
        what: what listens, for messages to people.
        setting: where its port is set.

    Raises:
        ConfigError: the port is out of range, in use or not allowed, or the host is none of this machine's.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"{setting} = {port}: a port is from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem = f"port {port} of {host} is in use; end what listens there, or set {setting} to another port (0 = any)"
        elif error.errno == errno.EACCES:
            problem = f"this process may not listen on port {port} of {host}; set {setting} to a port above 1023"
        else:
            problem = f"cannot listen on port {port} of {host} ({error}); give a host of this machine"
        raise ConfigError(f"the {what}: {problem}") from error
    keep_alive(sock)
    return sock
