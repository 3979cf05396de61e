"""The alerts of docs/operating.md: accepted by W&B's own classes, and about metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "operating.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def documented() -> set[str]:
    """The metrics in the table of docs/metrics.md, without their prefix."""
    rows = re.findall(r"^\| (`.+?) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_rules_for_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.automations import ProjectScope, SlackIntegration

    made: dict[str, Any] = {}
    api = SimpleNamespace(
        project=lambda name, entity: ProjectScope(id="1", name=name),
        slack_integrations=lambda entity: iter([SlackIntegration(id="2", team_name=entity, channel_name="alerts")]),
        create_automation=lambda new, name: made.update({name: new}),
    )
    monkeypatch.setattr(wandb, "Api", lambda: api)
    exec(block("python"), {})
    assert len(made) == 3
    for name, automation in made.items():
        metric, least = re.fullmatch(r"jetrl/(\w+) below (.+)", name).groups()  # type: ignore[union-attr]
        found = automation.event.filter.metric.threshold_filter
        assert metric in documented() and (found.name, found.cmp, found.threshold) == (f"jetrl/{metric}", "$lt", float(least))


def test_the_rules_for_prometheus() -> None:
    (group,) = yaml.safe_load(block("yaml"))["groups"]
    expressions = [rule["expr"] for rule in group["rules"]]
    assert len(expressions) == 4 and all(rule.keys() == {"alert", "expr"} for rule in group["rules"])
    names = {name for text in expressions for name in re.findall(r"jetrl_(\w+)", text)}
    assert "step" in names and names - {"step"} <= documented()
