"""Run the ``flax-ckpt`` command; each subcommand is a module, imported on use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from flax_ckpt_compat import __version__

from ._command_base import escape_what_cannot_be_shown, reporting_closed_pipe

_FILES = {"show_verify_diff_plan": ("diff", "plan", "show", "verify"), "clean_and_rm": ("clean", "rm")}
_COMMANDS = {name: f"{name}.command" for name in ("convert", "doctor", "ls", "run", "scan")}
_COMMANDS |= {name: f"{file}.{name}" for file, names in _FILES.items() for name in names}


class _LazyGroup(click.Group):
    """Click group that imports a subcommand's module on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click calls it so
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        file, _, function = _COMMANDS[cmd_name].partition(".")
        command: click.Command = getattr(import_module(f"{__name__}.{file}"), function)
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        escape_what_cannot_be_shown()
        with reporting_closed_pipe():  # of the help
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with reporting_closed_pipe():
            return super().invoke(ctx)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flax-ckpt")
def main() -> None:
    """Keep programs that call flax.training.checkpoints running, on msgpack and Orbax-format files."""
