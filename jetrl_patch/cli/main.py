"""``jetrl``: the command-line entry point. Subcommands import what they need when they are called."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from jetrl_patch import registry
from jetrl_patch.cli import run as launch
from jetrl_patch.config import SETTINGS, environment
from jetrl_patch.config.arguments import FLAG, options
from jetrl_patch.config.following import ANOTHER
from jetrl_patch.errors import JetrlError
from jetrl_patch.native.machine import require_torch
from jetrl_patch.patching.discovery import offered
from jetrl_patch.patching.identity import identity
from jetrl_patch.progress import Display

app = typer.Typer(
    name="jetrl",
    help="Train language models with RL in FP8, with bit-equal log-probs in rollout and trainer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _print_version(asked: bool) -> None:
    if asked:
        print(f"jetrl_patch {identity()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Hold the options of ``jetrl`` itself."""


@app.command(context_settings=_PASS_ON)
def parity(context: typer.Context) -> None:
    """Load a model into vLLM and into the trainer, and print how far their log-probs differ."""
    command = importlib.import_module("jetrl_patch.cli.parity.cli")
    raise typer.Exit(command.main(list(context.args)))


def _add_launcher(name: str, help: str) -> None:
    @app.command(name, help=help, context_settings=_PASS_ON)
    def run(context: typer.Context) -> None:
        launch.main(name, context.args)


_add_launcher("run", "Run a program with the plugin in all its processes: jetrl run --fp8-unified (-m MODULE | SCRIPT) ARGS...")
for _name, _program in registry.programs().items():
    _add_launcher(_name, f"Run {_program}: jetrl {_name} --fp8-unified ARGS...")


@app.command()
def status() -> None:
    """Print versions and what the environment asks for, in three lines. Exit status 1 if a version is unsupported."""
    from jetrl_patch.cli.status import brief

    raise typer.Exit(brief())


@app.command(context_settings={"allow_interspersed_args": False})
def doctor(
    command: Annotated[list[str] | None, typer.Argument(help="a complete launch command; put -- before it")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    fp8_unified: Annotated[bool, typer.Option(FLAG, help=f"short for --precision {FLAG[2:]}")] = False,
    precision: Annotated[str | None, typer.Option(help=SETTINGS["precision"].help)] = None,
    align: Annotated[str | None, typer.Option(help=SETTINGS["align"].help)] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting, as KEY=VALUE")] = None,
    through: Annotated[
        bool, typer.Option("--follow", help="run the command, such as a shell script, and examine the training that it starts")
    ] = False,
    instead: Annotated[bool, typer.Option("--instead", hidden=True)] = False,
    versions: Annotated[
        bool, typer.Option("--status", help="print only versions, the settings in the environment, and the patches they enable")
    ] = False,
) -> None:
    """Check whether a run would start here, what is missing, and what the plugin would change. Changes nothing.

    With --follow, a script runs as it is, up to the training program, which is examined and not started.
    With a launch command (jetrl doctor -- python -m verl.trainer.main_ppo ...) its arguments are checked too.
    Exit status: 0 if a run would start, 1 if not, 2 if the doctor cannot tell. With --status, 1 if an installed framework's
    version is unsupported.
    """
    if versions:
        from jetrl_patch.cli.status import full

        raise typer.Exit(full(as_json))
    from jetrl_patch.cli.doctor.examine import examine, show
    from jetrl_patch.cli.doctor.follow import follow, starts_training

    flags = [FLAG] if fp8_unified else []
    flags += [f"--{name}={value}" for name, value in (("precision", precision), ("align", align)) if value is not None]
    flags += [f"--set={pair}" for pair in set_ or ()]
    overrides = options(flags)
    if through and command:
        raise typer.Exit(follow(command, [*flags, *(["--json"] if as_json else [])]))
    if instead and not starts_training(command or ()):
        raise typer.Exit(ANOTHER)
    with Display("doctor") as progress:
        report = examine(overrides, command or (), progress)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        show(report)
    raise typer.Exit(report.status)


@app.command()
def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="a run's folder or metrics file; NAME=PATH names the run")
    ],
    out: Annotated[Path, typer.Option(help="folder for the page and charts, created if missing")] = Path("jetrl-report"),
    title: Annotated[str, typer.Option(help="the page's title")] = "Training runs compared",
    follow: Annotated[bool, typer.Option("--watch", help="rewrite the page while the runs continue, until Ctrl-C")] = False,
    every: Annotated[int, typer.Option(min=1, help="seconds between updates with --watch")] = 10,
    prometheus: Annotated[Path | None, typer.Option(help="also write the newest metrics to this file for node_exporter")] = None,
) -> None:
    """Compare runs: one self-contained HTML page, PNG charts, summary.json, and a table in the terminal.

    A RUN is a metrics.jsonl, verl's file-logger output, TRL's trainer_state.json, a console log of verl or OpenRLHF, a
    TensorBoard event file, or a folder with one of these.
    """
    from rich.console import Console

    from jetrl_patch.cli.report.command import command, watch

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)  # do not wrap output to a file or a pipe
    if follow:
        watch(runs, out, title, every, console, Console(stderr=True), prometheus=prometheus)
    else:
        command(runs, out, title, console, Console(stderr=True), prometheus)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="a Hugging Face folder, or a checkpoint of verl's FSDP engine")],
    out: Annotated[Path, typer.Argument(help="a new folder")],
    format_: Annotated[str, typer.Option("--format", help="bf16 or fp8")] = "bf16",
    scale_format: Annotated[str | None, typer.Option(help="pow2 or fp32; default: the run's, else pow2")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="name pattern of layers to keep in BF16; repeatable")] = None,
) -> None:
    """Write a checkpoint in plain BF16, or in block FP8 that stock vLLM serves.

    Every tensor is read back from disk before the folder gets its final name.
    """
    from rich.console import Console

    with Display("export") as display:
        display.stage("loading torch")
        require_torch("jetrl export")
        from jetrl_patch.cli.export import command
    command(checkpoint, out, format_, scale_format, exclude, Console(highlight=False, soft_wrap=True), display)


def main() -> None:
    """Run the console script. A JetrlError is printed on one line of stderr, with exit status 2."""
    if sys.argv[1:2] and sys.argv[1] in ("run", *registry.programs()):
        # bypass click, which would drop a lone `--` and catch the program's KeyboardInterrupt
        launch.main(sys.argv[1], sys.argv[2:])
        return

    try:
        offered()  # without them the frameworks' commands are missing, which has a better reason than "no such command"
        with environment.only_looking():
            app()
    except JetrlError as error:
        print(f"jetrl: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
