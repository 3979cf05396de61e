"""Settings of rollout formats and scales: their resolved values and their contradictions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl_patch.config import Config
from jetrl_patch.config.arguments import options
from jetrl_patch.errors import ConfigError


def test_what_they_come_to() -> None:
    int8 = Config(precision="int8-rollout")
    assert (int8.quantized_rollout, int8.fp8_rollout, int8.fp8_train, int8.exact) == (True, False, False, False)
    assert (int8.granularity, int8.resolved_smoothing, int8.resolved_align) == ("channel", 0.5, "none")
    assert Config(precision="int8-rollout", smoothing=0).resolved_smoothing == 0
    assert Config().granularity == "block" and Config().resolved_smoothing == 0
    channel = Config(precision="fp8-rollout", rollout_granularity="channel")
    assert channel.channelwise and channel.fp8_rollout and channel.resolved_smoothing == 0
    assert Config(precision="fp8-rollout", rollout_granularity="channel", smoothing=0.8).resolved_smoothing == 0.8


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"precision": "int8-rollout", "align": "exact"}, "align='exact' contradicts precision='int8-rollout'"),
        ({"precision": "int8-rollout", "smoothing": 1.1}, "smoothing=1.1 must lie between 0 (off) and 1"),
        ({"precision": "int8-rollout", "smoothing": -0.1}, "must lie between"),
        ({"precision": "int8-rollout", "smoothing": float("nan")}, "must be a finite number"),
        ({"precision": "int8-rollout", "smoothing": True}, "must be a finite number"),
        ({"precision": "int8-rollout", "smoothing": "0.5"}, "must be a finite number"),
        ({"precision": "int8-rollout", "backend": "triton"}, "backend='triton' contradicts precision='int8-rollout'"),
        (
            {"precision": "int8-rollout", "rollout_granularity": "channel"},
            "INT8 always has one scale per output channel",
        ),
        (
            {"rollout_granularity": "channel"},
            "contradicts precision='fp8-unified': the trainer's FP8 flow has 128-blocks",
        ),
        ({"precision": "bf16", "rollout_granularity": "channel"}, "only 'fp8-rollout' has a choice"),
        ({"precision": "fp8-rollout", "rollout_granularity": "row"}, "unknown rollout_granularity 'row'"),
        (
            {"precision": "fp8-rollout", "smoothing": 0.5},
            "smoothing=0.5 contradicts precision='fp8-rollout' with scales per",
        ),
        ({"smoothing": 0.5}, "smoothing=0.5 contradicts precision='fp8-unified'"),
        ({"precision": "bf16", "invariant_scale": 1.5}, "invariant_scale=1.5 contradicts precision='bf16'"),
        ({"invariant_scale": 0}, "invariant_scale=0 must be above 0"),
        ({"invariant_scale": -2.0}, "must be above 0"),
        ({"invariant_scale": float("inf")}, "must be a finite number"),
    ],
)
def test_nonsense_is_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**bad)
    assert message in str(error.value)


@given(
    precision=st.sampled_from(["int8-rollout", "fp8-rollout", "fp8-unified"]),
    smoothing=st.none() | st.floats(0, 1),
    invariant_scale=st.none() | st.floats(1e-3, 1e3),
    channel=st.booleans(),
)
def test_the_environment_carries_them(precision: Any, smoothing: Any, invariant_scale: Any, channel: bool) -> None:
    granularity: Any = "channel" if channel and precision == "fp8-rollout" else "block"
    if precision == "fp8-unified" or (precision == "fp8-rollout" and granularity == "block"):
        smoothing = None
    config = Config(
        precision=precision, smoothing=smoothing, invariant_scale=invariant_scale, rollout_granularity=granularity
    )
    assert Config.from_env(config.to_env()) == config


def test_text_that_is_no_number() -> None:
    with pytest.raises(ConfigError, match="JETRL_SMOOTHING='much' is not a number"):
        Config.from_env({"JETRL_PRECISION": "int8-rollout", "JETRL_SMOOTHING": "much"})
    found = options(["--precision", "int8-rollout", "--set", "smoothing=0.8"])
    assert Config(**found) == Config(precision="int8-rollout", smoothing=0.8)
