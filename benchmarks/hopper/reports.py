"""A pytest plugin: what each test did, a line of JSON each as it ends, to the file descriptor of ``--reports-to``.

After an illegal access every later test of the process would fail too, so the first broken device ends the session.
"""

from __future__ import annotations

import json
import os

import pytest

from benchmarks.gpu.device import is_broken


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reports-to", type=int, required=True, help="file descriptor")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    descriptor = config.getoption("--reports-to")
    os.set_inheritable(descriptor, False)
    config.pluginmanager.register(Reports(descriptor))


class Reports:
    """Writes a line ``{"begins": test}``, one with its outcome (two if its end fails as well), and ``{"ends": test}``."""

    def __init__(self, descriptor: int) -> None:
        self._out = os.fdopen(descriptor, "w", buffering=1)
        self._seconds = 0.0

    def _write(self, **found: object) -> None:
        print(json.dumps(found), file=self._out)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._seconds = 0.0
        self._write(begins=_name(nodeid))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(ends=_name(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.outcome == "passed" and report.when != "call":
            return  # of a test, its call counts; of set-up and end, what went wrong
        outcome, reason = outcome_of(report)
        self._write(test=_name(report.nodeid), outcome=outcome, reason=reason, seconds=self._seconds)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
        report = yield
        if report.failed and is_broken():
            item.session.shouldstop = "the device is broken"
        return report


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def outcome_of(report: pytest.TestReport) -> tuple[str, str]:
    """``passed``, ``failed``, ``refused`` (an expected failure, which a test declares) or ``skipped``, and why."""
    if hasattr(report, "wasxfail"):
        return ("refused", report.wasxfail) if report.outcome == "skipped" else ("failed", "it passed, against its xfail")
    if report.outcome == "skipped":
        words = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return "skipped", words.removeprefix("Skipped: ")
    return report.outcome, "" if report.outcome == "passed" else report.longreprtext.splitlines()[-1][:300]
