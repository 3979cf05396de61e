"""Run all checks in order and show the result, problems first. A problem does not end the examination."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from jetrl_patch import registry
from jetrl_patch._versions import SUPPORTED
from jetrl_patch.cli.doctor import checks, memory
from jetrl_patch.cli.doctor.checks import check_patches, check_versions
from jetrl_patch.cli.doctor.launch import Started, check_command, check_launch, check_settings, recognise, usable
from jetrl_patch.cli.doctor.saves import check_saves
from jetrl_patch.cli.run import program_problem
from jetrl_patch.cli.status import table
from jetrl_patch.config import Config, environment
from jetrl_patch.errors import JetrlError
from jetrl_patch.native.machine import check_torch
from jetrl_patch.patching.guards import is_installed
from jetrl_patch.progress import SILENT, Progress
from jetrl_patch.trainer.rules import NOTHING, Check, Report, from_error

# ---- Print a report as a table in the terminal ---------------------------------------------------
# Problems come first, then what could not be checked and warnings, then what the run would change, then the rest.

_STYLES = {
    "problem": "bold red", "unknown": "magenta", "warning": "yellow", "change": "cyan", "ok": "green", "skipped": "dim",
}  # fmt: skip
#: the states of each part of the table; a line between two parts
_PARTS = (("problem",), ("unknown", "warning"), ("change",), ("ok", "skipped"))
#: how the names of the checks end that say what a run would change, if they are ok
_CHANGES = ("patches", " changes")


def show(report: Report, console: Console | None = None) -> None:
    """Print the checks, what to do about them, what a run would change, and the verdict."""
    console = console or Console()
    findings = table("check", "", "finding")
    # a command that nothing switches on changes nothing
    enabled = all(check.state == "ok" for check in report.checks if check.name == "switched on")
    rows = [
        ("change" if enabled and check.state == "ok" and check.name.endswith(_CHANGES) else check.state, check)
        for check in report.checks
    ]
    for part in _PARTS:
        for state, check in sorted((row for row in rows if row[0] in part), key=lambda row: part.index(row[0])):
            finding = _patches(report) if check.name == "patches" and state == "change" else check.finding
            to_do = f"\n[bold]→[/] {escape(check.to_do)}" if check.to_do else ""
            findings.add_row(check.name, f"[{_STYLES[state]}]{state}[/]", escape(finding) + to_do)
        findings.add_section()
    console.print(findings)
    if report.memory:
        estimate = table("side", "what", "", "from", title="memory on each rank, an estimate")
        estimate.columns[2].justify = "right"
        for row in report.memory:
            estimate.add_row(row.side, row.what, "?" if row.bytes is None else memory.size(row.bytes), escape(row.how))
        console.print(estimate)
        console.print(f"[dim]{memory.NOT_COUNTED}[/]")
    color = {True: "green", False: "red", None: "magenta"}[report.starts]
    console.print(f"[bold {color}]{report.verdict}[/]")


def _patches(report: Report) -> str:
    """The patches of this run, one line per package, without those of a framework that the command does not use."""
    known = checks.packages()
    used = known.get(report.framework or "", ())
    idle = {package for packages in known.values() for package in packages if used and package not in used}
    found = [(re.split("[.:]", patch.target)[0], bool(patch.fixes)) for patch in report.patches]
    counts = Counter(package for package, _ in found if package not in idle)
    fixes = Counter(package for package, is_fix in found if is_fix)

    def counted(number: int) -> str:
        return f"{number} patch{'es' * (number != 1)}"

    lines = [
        f"{package}: {counted(number)}" + (f" (bug fixes: {fixes[package]})" if fixes[package] else "")
        for package, number in counts.most_common() if package in SUPPORTED
    ]  # fmt: skip
    rest = [package for package in counts if package not in SUPPORTED]
    if rest:
        lines.append(f"{', '.join(rest)}: {counted(sum(counts[package] for package in rest))}")
    return "\n".join([*lines, "--json lists each with its reason"])


# ---- Run all checks in order: versions, settings, machine, patches, and the command --------------

def examine(overrides: dict[str, Any], command: Sequence[str] = (), progress: Progress = SILENT) -> Report:
    """Check everything and change nothing.

    Args:
        overrides: fields of ``Config`` given to ``jetrl doctor``; they override the command and the environment.
        command: the launch command; if empty, only machine and installation are checked.
    """
    report = Report()
    progress.stage("checking the installation")
    started: Started | None = None
    try:
        started = recognise(command) if command else None
    except JetrlError as error:
        report.checks.append(from_error("command", error))
        return report
    report.framework = started.framework if started else None
    environ = {**os.environ, **(started.environ if started else {})}
    report.checks += check_versions(report.framework)
    report.stopped = checks.stopped(report.checks)
    if started is not None:
        report.checks += check_command(started.before)
        if not check_torch()[0]:  # reading the arguments imports torch, and so do the frameworks
            report.checks.append(Check("command", "skipped", "its arguments cannot be read without torch (see below)"))
            started = None
    progress.stage("reading the settings")
    arguments, config = _settings(report, overrides, started, environ)
    report.config = config
    progress.stage("checking the machine")
    report.checks += checks.check_machine(config, environ.get("RAY_ADDRESS", ""))
    framework = report.framework if arguments is not None else None
    needs = registry.launches(framework).needs_flash_attn(arguments) if framework else None
    report.checks.append(checks.check_flash_attn(registry.platform().is_cpu_run(config), needs))
    progress.stage("checking the patches")
    check, report.patches = check_patches(config)
    report.checks.append(check)
    if framework:
        progress.stage("checking the command")
        report.checks += check_launch(framework, arguments, config, environ)
        known = {check.finding for check in report.checks}  # check_settings repeats an error in verl's jetrl section
        report.checks += [found for found in check_settings(framework, arguments, config) if found.finding not in known]
        launches = registry.launches(framework)
        storage = launches.storage(arguments, config)
        model = memory.count(launches.model_path(arguments)[0], storage, config)
        report.checks += check_saves(launches.saves(arguments), storage, model, config)
        report.memory = [] if model is None else memory.estimate(model, storage, config)
    return report


def _settings(
    report: Report, overrides: dict[str, Any], started: Started | None, environ: dict[str, str]
) -> tuple[Any, Config]:
    """The framework's own settings (None if unknown), and the plugin's from options, environment or command.

    Reports a wrong setting as a problem and ignores it, to check everything else as well.
    """
    given = {**(started.overrides if started else {}), **overrides}
    arguments: Any = None
    config, wrong = usable(environ, given)
    report.checks += [from_error("settings", error) for error in wrong]
    known = environment.VARIABLES
    environ = {name: value for name, value in environ.items() if not name.startswith(environment.PREFIX) or name in known}
    opted_in = _opted_in(environ)
    source = "options, then the environment" if given else "the environment" if opted_in else "the defaults"
    if started is not None:
        arguments = _arguments(report, started)
        launches = registry.launches(started.framework) if started.framework and arguments is not None else None
        by_settings = False
        if launches is not None and not opted_in:
            try:
                section = launches.asked_for(arguments, environ)
                by_settings = section is not None
                if section is not None and not given:
                    config, source = section, f"{started.framework}'s configuration"
            except JetrlError as error:
                by_settings = True
                report.checks.append(from_error("settings", error))
        report.checks.append(_switched_on(started, environ, by_settings))
        if launches is not None:
            config = launches.chosen(arguments, config)
    name = "judged with" if any(check.name == "settings" for check in report.checks) else "settings"
    words = f"precision {config.precision}, align {config.resolved_align}, scales {config.scale_format}"
    report.checks.append(Check(name, "ok", f"{words} (from {source})"))
    return arguments, config.resolved()


def _arguments(report: Report, started: Started) -> Any:
    """The framework's own configuration; None if it cannot be read, which a check then explains."""
    arguments, launches = None, registry.resolve(started.framework).launches() if started.framework else None
    if problem := program_problem(started.target):
        check = from_error("command", problem)
    elif launches is None and started.framework:
        finding = f"the adapter of {started.framework} does not read its arguments, so they were not checked"
        check = Check("command", "unknown", finding)
    elif launches is None:
        known = " or ".join(registry.programs())
        finding = f"{started.target or 'the command'} is not a program of {known}, so its arguments were not checked"
        fix = "`jetrl doctor --follow -- …` runs the command up to the training, which it examines instead"
        check = Check("command", "unknown", finding, fix)
    elif started.target not in launches.programs:
        only = " and ".join(launches.programs)
        finding = f"{started.target} belongs to {started.framework}, but only the arguments of {only} can be checked"
        check = Check("command", "unknown", finding)
    elif not is_installed(started.framework or ""):
        check = Check("command", "skipped", f"{started.target}: {started.framework} is not installed")
    else:
        try:
            arguments = launches.read(started.arguments, started.target)
            check = Check("command", "ok", f"{started.target}, {len(started.arguments)} arguments read")
        except JetrlError as error:
            check = from_error("command", error)
    report.checks.append(check)
    return arguments


def _switched_on(started: Started, environ: Mapping[str, str], by_settings: bool) -> Check:
    """Whether the command would run patched at all."""
    start = f"jetrl {started.framework or 'run'}"
    name, by_environment, by_option = "switched on", _opted_in(environ), "precision" in started.overrides
    if by_option and not by_environment and environ.get(environment.SWITCH, "").strip():
        finding = f"the command sets a precision, but {environment.SWITCH}=0 disables the plugin"
        return Check(name, "problem", finding, "drop one of the two")
    if started.overrides and not by_option and not by_environment:
        finding = f"{', '.join(started.overrides)} without a precision: {NOTHING}"
        return Check(name, "problem", finding, "add --fp8-unified or --precision NAME")
    if by_settings or (started.by_us and (by_environment or by_option)):
        return Check(name, "ok", "the command enables jetrl_patch")
    if by_environment and environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        finding = "the environment enables jetrl_patch, but TORCH_DEVICE_BACKEND_AUTOLOAD keeps torch from loading it"
        return Check(name, "problem", finding, "drop that variable")
    if by_environment:
        return Check(name, "ok", "the environment enables jetrl_patch in every process that imports torch")
    way = f"use `{start} --fp8-unified …`"
    reads = started.framework is not None and registry.resolve(started.framework).has_section
    fix = f"{way}, JETRL_PRECISION or +jetrl=unified" if reads else f"{way}, or JETRL_PRECISION"
    launches = registry.resolve(started.framework).launches() if started.framework else None
    if launches is None or started.target not in launches.programs:
        return Check(name, "unknown", "nothing enables jetrl_patch, unless the program calls jetrl_patch.enable()", fix)
    return Check(name, "problem", f"nothing enables jetrl_patch: {NOTHING}", fix)


def _opted_in(environ: Mapping[str, str]) -> bool:
    """As ``environment.opted_in``; a malformed switch, which is a problem of its own, counts as off."""
    try:
        return environment.opted_in(environ)
    except JetrlError:
        return False
