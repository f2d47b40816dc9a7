"""Names that a person types: the nearest valid one when it is wrong, and what a shell completes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    _ClickChoice = click.Choice[str]
    _ClickType = click.ParamType[str]
else:  # generic in newer versions of click only
    _ClickChoice, _ClickType = click.Choice, click.ParamType


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no known name is near."""
    from kvactors.textfiles import did_you_mean

    return did_you_mean(name, known)


def check_name(option: str, name: str, known: Sequence[str], what: str) -> None:
    """Refuses a name that is not known.

    Raises:
        UsageError: names the option, the nearest name, and all of them.
    """
    if name not in known:
        hint = suggestion(name, known) or ";"
        raise click.UsageError(f"{option} {name}: unknown {what}{hint} use one of {', '.join(known)}")


class Choice(_ClickChoice):
    """One of some names; says which is the nearest when it is none of them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            hint = suggestion(str(value), self.choices) or ";"
            self.fail(f"unknown name {value!r}{hint} use one of {', '.join(self.choices)}", param, ctx)
        return super().convert(value, param, ctx)


class Named(_ClickType):
    """A name that is checked later, or the name of a file: what a shell completes.

    Args:
        names: called only when a shell asks, so that nothing is imported for it otherwise.
        files: whether a file will do too.
    """

    name = "text"

    def __init__(self, names: Callable[[], Iterable[str]], *, files: bool = False) -> None:
        self._names, self._files = names, files

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        found = [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]
        return found or ([CompletionItem(incomplete, type="file")] if self._files else [])


def layout_names() -> Iterable[str]:
    from kvactors.layouts import FAMILIES

    return FAMILIES


def store_names() -> Iterable[str]:
    from kvactors.stores import BACKENDS

    return BACKENDS


def fault_plans() -> Iterable[str]:
    from kvactors.stores import PRESETS

    return PRESETS


def simulated_models() -> Iterable[str]:
    from kvactors.simulate.models import NAMES

    return (*NAMES, *layout_names())


def simulated_faults() -> Iterable[str]:
    from kvactors.simulate.faults import ALL, PRESETS

    return (*PRESETS, ALL)


def trace_formats() -> Iterable[str]:
    from kvactors.replay.formats import FORMATS

    return FORMATS
