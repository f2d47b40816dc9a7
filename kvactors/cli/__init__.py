"""The command line: `kvactors replay`, `trace`, `simulate`, `layout`, `store`, `bench`, `doctor` and `completion`.

Exit codes: 0 = all well; 1 = a request failed, a byte was wrong or an invariant broke; 2 = bad usage or input, with one
line on stderr; 130 = interrupted (after a drain and the partial report); 143 and 129 = the same by SIGTERM and SIGHUP.

A module a command. They import what they need when they are run, so that `--help` and a shell's completion are quick.
"""

from kvactors.cli.root import cli, main

__all__ = ["cli", "main"]
