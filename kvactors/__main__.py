"""The entry point of `kvactors` and `python -m kvactors`: quick to import, so that Ctrl-C is never a traceback."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130


def main() -> None:
    """Runs the command line. While its modules are imported nothing has begun, so Ctrl-C just ends the process."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    _fill_closed_streams()
    from kvactors.cli import main as run

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        if raises:  # what is left is the interpreter's own end
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _fill_closed_streams() -> None:
    """A stream that was closed by whoever started us must not become the number of some socket: uvloop aborts at that."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


if __name__ == "__main__":
    main()
