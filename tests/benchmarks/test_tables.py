"""Tables, marks in pages, and the CPU benchmark's timer."""

from __future__ import annotations

import pytest

from benchmarks import cpu
from scripts import tables


def test_the_best_of_rounds_that_take_turns(monkeypatch):
    clock, told = [0.0], []

    def call(name, seconds):
        told.append(name)
        clock[0] += seconds if len(told) < 12 else 2 * seconds  # the machine becomes busy

    monkeypatch.setattr(cpu.time, "process_time", lambda: clock[0])
    found = cpu.best_of({"a": lambda: call("a", 1.0), "b": lambda: call("b", 3.0)}, seconds=2.0, rounds=6)
    assert found == {"a": 1.0, "b": 3.0} and told[4:] == ["a", "b"] * 6


def test_a_table_may_lack_rows_and_columns():
    assert tables.markdown([{"a": 1.23456, "b": float("nan")}, {"a": 12345.6, "c": "x|y"}], "T", "why") == (
        "## T\n\nwhy\n\n| a | b | c |\n| --- | --- | --- |\n| 1.23 | – |  |\n| 12346 |  | x/y |\n"
    )
    assert tables.markdown([], "T") == "## T\n\n"


def test_what_is_between_marks_is_replaced():
    texts = {"a": "new", "b": "| x |\n| y |\n"}
    found = tables.filled("It is <!-- a -->old<!-- /a -->.\n\n<!-- b --><!-- /b -->\n", texts)
    assert found == "It is <!-- a -->new<!-- /a -->.\n\n<!-- b -->\n| x |\n| y |\n<!-- /b -->\n"
    assert tables.filled(found, texts) == found
    for page in ("no mark", "<!-- a -->", "<!-- /a --><!-- a -->"):
        with pytest.raises(ValueError, match="needs the marks <!-- a --> and <!-- /a -->"):
            tables.filled(page, {"a": "x"})
