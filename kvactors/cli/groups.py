"""Command groups: one line for every mistake, the nearest name, commands that are imported when they are used."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import click

from kvactors.cli.names import Choice, suggestion
from kvactors.console import lasting_streams, logging_to_stderr
from kvactors.errors import KVActorsError, LocalError

HELP_COLUMNS = 100
"""A help text is as wide as the terminal, up to this."""


def example(*lines: str) -> str:
    """The end of a help text: command lines that work."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


class NoCommand(click.UsageError):
    """A group was named without a command; the message is its help."""


@dataclass(frozen=True, slots=True)
class Lazy:
    """A command that is imported when it is used.

    Attributes:
        module, attribute: where it is.
        help: its line in the group's help.
        example: the end of its help, where it has none of its own.
    """

    module: str
    attribute: str
    help: str
    example: str

    def load(self) -> click.Command:
        command: click.Command = getattr(importlib.import_module(self.module), self.attribute)
        command.epilog = command.epilog or self.example
        for parameter in command.params:
            if type(parameter.type) is click.Choice:
                parameter.type = Choice(parameter.type.choices)
        return command


class Group(click.Group):
    """Without a command it shows its help, but on stderr: that is bad usage. An unknown command is told the nearest one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy: dict[str, Lazy] = {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            raise NoCommand(ctx.get_help())
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        known = self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            hint = suggestion(name, known) or f"; commands are {', '.join(known)}"
            raise click.UsageError(f"no such command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.lazy and cmd_name not in self.commands:
            self.add_command(self.lazy[cmd_name].load(), cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names), default=0)
        rows = []
        for name in names:
            lazy, command = self.lazy.get(name), self.commands.get(name)
            text = lazy.help if lazy is not None else command.get_short_help_str(limit) if command is not None else ""
            rows.append((name, text))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class Root(Group):
    """Turns our own errors into one line on stderr and exit code 2, and outlives the streams it prints on."""

    group_class = Group

    def main(self, *args: Any, **kwargs: Any) -> Any:
        standalone = kwargs.pop("standalone_mode", True)
        with lasting_streams() as (out, _), logging_to_stderr():
            code = self._code(args, kwargs)
            out.flush()
            if out.problem is not None:
                _complain(f"standard output cannot be written: {out.problem}")
                code = code or 1
        if not standalone:
            return code
        sys.exit(code if isinstance(code, int) else 0)

    def _code(self, args: Any, kwargs: Any) -> Any:
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except NoCommand as error:
            click.echo(error.message, err=True)
            return 2
        except click.exceptions.Exit as error:
            return error.exit_code
        except click.ClickException as error:
            _complain(error.format_message())
            return 2
        except (click.Abort, KeyboardInterrupt):
            return 130
        except LocalError as error:
            _complain(str(error))
            return 2
        except KVActorsError as error:
            _complain(str(error))
            return 1


def _complain(text: str) -> None:
    click.echo(f"kvactors: {' '.join(text.split())}", err=True)
