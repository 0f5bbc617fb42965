"""Run the ``flax-ckpt`` command; each subcommand is a module, imported on use."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from flax_ckpt_compat import __version__

from ._command_base import escape_what_cannot_be_shown, reporting_closed_pipe

_COMMANDS = {  # with what the help of all commands says of each, for which none is loaded
    "clean": "Remove what interrupted saves left.",
    "convert": "Convert checkpoints to another layout.",
    "diff": "Compare two checkpoints, leaf by leaf.",
    "doctor": "Print what a bug report needs.",
    "ls": "List the checkpoints in a directory.",
    "plan": "Preview a restore into your state.",
    "rm": "Remove checkpoints, whole.",
    "run": "Run a program unchanged, with the shim installed.",
    "scan": "Find what breaks in a program.",
    "show": "Show the tree of a checkpoint.",
    "verify": "Find damaged checkpoints.",
}
_FUNCTIONS = {"clean": "removing.clean", "rm": "removing.rm"}  # where it is not `command` of the file of that name


class _LazyGroup(click.Group):
    """Click group that imports a subcommand's module on use, for its command."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click calls it so
        return list(_COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name, help=text) for name, text in _COMMANDS.items() if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        file, _, function = _FUNCTIONS.get(cmd_name, f"{cmd_name}.command").partition(".")
        command: click.Command = getattr(import_module(f"{__name__}.{file}"), function)
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        escape_what_cannot_be_shown()
        with reporting_closed_pipe():  # of the help
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with reporting_closed_pipe():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and args[0][:1].isalnum():  # click suggests only loaded commands
            near = difflib.get_close_matches(args[0], _COMMANDS, 1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}.{meant}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flax-ckpt")
def main() -> None:
    """Keep programs that call flax.training.checkpoints running, on msgpack and Orbax-format files."""
