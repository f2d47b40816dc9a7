"""`kvactors completion SHELL`: the script that makes a shell complete commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kvactors.cli.groups import example
from kvactors.cli.names import Choice

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_KVACTORS_COMPLETE"


@click.command(epilog=example('eval "$(kvactors completion bash)"', "kvactors completion fish | source"))
@click.argument("shell", type=Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes words in a shell.

    It completes commands, options, layouts, stores, presets, formats and benchmarks. Put the line of the example into
    ~/.bashrc, ~/.zshrc (with zsh), or ~/.config/fish/config.fish.
    """
    made = get_completion_class(shell)
    if made is None:
        raise click.UsageError(f"{shell}: this version of click has no completion for it")
    script = made(ctx.find_root().command, {}, "kvactors", VARIABLE)
    click.echo(script.source_template % script.source_vars())
