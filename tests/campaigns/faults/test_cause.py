"""How the campaign reads a run's log for the cause of its end."""

from __future__ import annotations

from tests.campaigns.faults.runs import FAULTS, cause

LOG = """\
Traceback (most recent call last):
\x1b[36m(TaskRunner pid=12)\x1b[0m RuntimeError: injected by the test
the run in /tmp/x ended
"""


def test_the_last_error_that_fits_without_colours():
    assert cause(LOG, FAULTS["raises"]) == "RuntimeError: injected by the test"
    assert cause(LOG, FAULTS["SIGTERM"]) == "" and cause(LOG, None) == ""


def test_a_line_counts_where_no_error_fits():
    assert cause("a worker was killed\nValueError: no\n", FAULTS["killed"]) == "a worker was killed"


def test_what_a_raylet_counts_names_no_cause():
    log = "[state-dump] \tNodeManagerService.dead - 1 total\nThe actor died because its node has died.\n[state-dump] dead"
    assert cause(log, FAULTS["node lost"]) == "The actor died because its node has died."
