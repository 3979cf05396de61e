"""Settings: defaults, every bad input, the environment."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_patch.config import SETTINGS, Config, environment
from jetrl_patch.config.corrections import CORRECTIONS, KINDS, Kind
from jetrl_patch.config.fields import GROUPS, WORD
from jetrl_patch.config.modes import MODES, PRECISIONS, ROLLOUT_FORMATS, Granularity, Mode, Precision
from jetrl_patch.errors import ConfigError
from jetrl_patch.sync.protocol import Terms
from jetrl_patch.sync.send import QUANTIZERS


def test_defaults_and_what_they_come_to() -> None:
    config = Config()
    assert dataclasses.asdict(config) == {
        "precision": "fp8-unified",
        "align": None,
        "scale_format": "pow2",
        "exclude": (),
        "on_cut": "refuse",
        "backend": "auto",
        "old_log_probs": "auto",
        "audit_fraction": 0.0625,
        "on_mismatch": "stop",
        "router_replay": "none",
        "decode_graphs": "auto",
        "exact_attention": "auto",
        "platform": "auto",
        "sync": "full",
        "sync_timeout": 300.0,
        "fp8_all_gather": False,
        "monitor_every": 10,
        "monitor_layers": False,
        "monitor_sqnr": 20.0,
        "monitor_underflow": 0.1,
        "monitor_action": "warn",
        "measure_routes": False,
        "guard_sqnr": None,
        "correction": "none",
        "correction_bounds": None,
        "acr": False,
        "rollout_granularity": "block",
        "smoothing": None,
        "invariant_scale": None,
        "kv_cache": "auto",
        "head_dtype": "auto",
        "optimizer_states": "fp32",
        "resume_any": False,
        "upstream_fixes": None,
    }
    assert config.resolved_align == "exact"
    assert (config.exact, config.fp8_train, config.fp8_rollout) == (True, True, True)
    assert config.resolved() == Config(align="exact")
    assert Config(head_dtype="bfloat16").resolved() == config.resolved() != Config(head_dtype="float32").resolved()


@pytest.mark.parametrize(
    ("precision", "align", "resolved", "train", "rollout"),
    [
        ("bf16", None, "none", False, False),
        ("fp16", None, "none", False, False),
        ("fp8-rollout", None, "none", False, True),
        ("fp8-unified", "linear", "linear", True, True),
        ("fp8-unified", "exact", "exact", True, True),
    ],
)
def test_modes(precision: Any, align: Any, resolved: str, train: bool, rollout: bool) -> None:
    config = Config(precision=precision, align=align)
    assert (config.resolved_align, config.fp8_train, config.fp8_rollout) == (resolved, train, rollout)
    assert config.exact == (resolved == "exact")
    assert config.resolved().resolved() == config.resolved()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"precision": "fp9"}, "unknown precision 'fp9'. Set it to one of 'bf16', 'fp8-unified', 'fp8-rollout'"),
        ({"precision": "FP8-unified"}, "unknown precision"),
        ({"precision": None}, "unknown precision None"),
        ({"precision": ["bf16"]}, "unknown precision"),
        ({"precision": "fp16", "align": "exact"}, "align='exact' contradicts precision='fp16'"),
        ({"kv_cache": "fp16"}, "unknown kv_cache 'fp16'. Set it to one of 'auto', 'fp8'"),
        ({"kv_cache": "fp8", "exact_attention": "flash3"}, "only the project's kernel reads an FP8 cache. Drop one"),
        ({"head_dtype": "fp32"}, "unknown head_dtype 'fp32'. Set it to one of 'auto', 'bfloat16', 'float32'"),
        ({"head_dtype": "bfloat16", "precision": "fp16"}, "one 16-bit format, found two"),
        ({"align": "none"}, "unknown align 'none'"),
        ({"align": "bits"}, "unknown align 'bits'. Set it to one of 'exact', 'linear'"),
        ({"precision": "bf16", "align": "exact"}, "align='exact' contradicts precision='bf16'"),
        ({"precision": "fp8-rollout", "align": "linear"}, "align='linear' contradicts precision='fp8-rollout'"),
        ({"scale_format": "e8m0"}, "unknown scale_format 'e8m0'"),
        ({"backend": "cublas"}, "unknown backend 'cublas'"),
        ({"platform": "tpu"}, "unknown platform 'tpu'"),
        ({"exclude": "mlp.gate"}, "must be a list of patterns"),
        ({"exclude": None}, "must be a list of patterns"),
        ({"exclude": (3,)}, "3, not a string. Give one pattern per entry"),
        ({"exclude": ("",)}, "empty name part"),
        ({"exclude": ("mlp..gate",)}, "empty name part"),
        ({"exclude": (".mlp",)}, "empty name part"),
        ({"exclude": ("a,b",)}, "comma or a blank"),
        ({"exclude": ("a b",)}, "comma or a blank"),
        ({"sync": "changes"}, "unknown sync 'changes'"),
        ({"sync": "delta", "precision": "bf16"}, "sync='delta' contradicts precision='bf16'"),
        ({"sync": "delta", "precision": "fp16"}, "sync='delta' contradicts precision='fp16'"),
        ({"sync_timeout": 0}, "positive, finite"),
        ({"sync_timeout": -1.0}, "positive, finite"),
        ({"sync_timeout": float("inf")}, "positive, finite"),
        ({"sync_timeout": float("nan")}, "positive, finite"),
        ({"sync_timeout": "300"}, "positive, finite"),
        ({"sync_timeout": True}, "positive, finite"),
        ({"fp8_all_gather": 1}, "must be True or False"),
        ({"resume_any": 1}, "resume_any=1 must be True or False"),
        ({"upstream_fixes": "on"}, "upstream_fixes='on' must be True or False"),
        ({"resume_any": None}, "resume_any=None must be True or False"),
        ({"optimizer_states": "4bit"}, "unknown optimizer_states '4bit'. Set it to one of 'fp32', '8bit', 'fp8'"),
        ({"optimizer_states": "fp8", "fp8_all_gather": True}, "contradicts fp8_all_gather=True"),
        ({"fp8_all_gather": True, "precision": "fp8-rollout"}, "contradicts precision='fp8-rollout'"),
        ({"monitor_every": -1}, "monitor_every=-1 must be a whole number of steps. Set it to 0 to turn the monitor off."),
        ({"monitor_every": 2.5}, "monitor_every=2.5 must be a whole number"),
        ({"monitor_every": True}, "monitor_every=True must be a whole number"),
        ({"monitor_layers": 1}, "monitor_layers=1 must be True or False"),
        ({"monitor_sqnr": "20"}, "monitor_sqnr='20' must be a finite number"),
        ({"monitor_underflow": 1.5}, "monitor_underflow=1.5 must be between 0 and 1"),
        ({"old_log_probs": "rollout", "align": "linear"}, "old_log_probs='rollout' contradicts align='linear'"),
        ({"old_log_probs": "rollout", "precision": "bf16"}, "old_log_probs='rollout' contradicts align='none'"),
        ({"old_log_probs": "vllm"}, "unknown old_log_probs 'vllm'. Set it to one of 'auto', 'recompute', 'rollout'"),
        ({"audit_fraction": -0.1}, "audit_fraction=-0.1 must be between 0 and 1"),
        ({"on_mismatch": "warn"}, "unknown on_mismatch 'warn'"),
        ({"router_replay": "R2"}, "unknown router_replay 'R2'. Set it to one of 'none', 'R3'"),
        ({"router_replay": "R3"}, "router_replay='R3' contradicts align='exact'"),
        *(
            ({"router_replay": "R3", "precision": name}, f"router_replay='R3' contradicts precision={name!r}")
            for name in ("bf16", "fp16", "int8-rollout")
        ),
        ({"decode_graphs": "on"}, "decode_graphs='on' must be 'auto', True or False"),
        ({"decode_graphs": True, "align": "linear"}, "decode_graphs=True contradicts align='linear'"),
        ({"decode_graphs": True, "guard_sqnr": 20}, "decode_graphs=True contradicts guard_sqnr=20"),
        ({"monitor_action": "halt"}, "unknown monitor_action 'halt'. Set it to one of 'warn', 'stop'"),
        ({"guard_sqnr": float("nan")}, "guard_sqnr=nan must be a finite number"),
        ({"guard_sqnr": 20, "monitor_every": 0}, "Set monitor_every to 1 or more"),
        ({"guard_sqnr": 20, "fp8_all_gather": True}, "contradicts fp8_all_gather=True"),
        ({"guard_sqnr": 20, "backend": "te"}, "contradicts backend='te'"),
        ({"guard_sqnr": 20, "precision": "fp8-rollout"}, "contradicts precision='fp8-rollout'"),
        ({"correction": "TIS"}, "unknown correction 'TIS'. Set it to one of 'none', 'tis', 'seq-tis'"),
        ({"correction_bounds": 2.0}, "belongs to no correction"),
        ({"correction": "tis", "correction_bounds": "2"}, "must be one number, the cap, or two"),
        ({"correction": "tis", "correction_bounds": True}, "must be one number"),
        ({"correction": "tis", "correction_bounds": ()}, "found 0 numbers"),
        ({"correction": "tis", "correction_bounds": 0}, "the cap must be a positive, finite number"),
        ({"correction": "tis", "correction_bounds": -1.0}, "positive, finite"),
        ({"correction": "tis", "correction_bounds": float("nan")}, "positive, finite"),
        ({"correction": "seq-tis", "correction_bounds": float("inf")}, "positive, finite"),
        ({"correction": "tis", "correction_bounds": (0.5, 2.0)}, "required one number, the cap, found 2"),
        ({"correction": "icepop", "correction_bounds": 2.0}, "required low and high, found 1"),
        ({"correction": "geo-mis", "correction_bounds": (1.01, 0.99)}, "low must lie between 0 and high"),
        ({"correction": "mis", "correction_bounds": (float("nan"), 2.0)}, "low must lie between 0 and high"),
        ({"correction": "seq-mis", "correction_bounds": (-1.0, 2.0)}, "low must lie between 0 and high"),
        ({"correction": "mis", "correction_bounds": (1, 2, 3)}, "found 3 numbers"),
        ({"correction": "mis", "correction_bounds": 0.9}, "agree, found 0.9. Move the bounds, or drop"),
        ({"correction": "tis", "correction_bounds": 0.5}, "required bounds around 1"),
        ({"correction": "geo-mis", "correction_bounds": (1.1, 2)}, "geo-mis': required bounds around 1"),
        ({"acr": True}, "acr=True with correction='none'"),
        ({"acr": True, "correction": "seq-tis"}, "Set correction='tis' or drop acr"),
        ({"acr": "yes", "correction": "tis"}, "must be True or False"),
    ],
)
def test_nonsense_is_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**bad)
    assert message in str(error.value)
    assert isinstance(error.value, ValueError)


def test_it_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().precision = "bf16"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config("bf16")  # type: ignore[call-arg]
    assert hash(Config(exclude=["a"])) == hash(Config(exclude=("a",)))  # type: ignore[arg-type]


def test_replace_names_unknown_settings() -> None:
    assert Config().replace(precision="bf16") == Config(precision="bf16")
    with pytest.raises(ConfigError, match=r"unknown setting precison\. Use precision, or another name"):
        Config().replace(precison="bf16")


def test_the_types_and_the_tables_name_the_same() -> None:
    assert get_args(Precision) == PRECISIONS == SETTINGS["precision"].choices == tuple(mode.name for mode in MODES.values())
    assert get_args(Kind) == KINDS == SETTINGS["correction"].choices == ("none", *CORRECTIONS)
    assert {found.name for mode in MODES.values() for found in mode.formats} == set(ROLLOUT_FORMATS) == set(QUANTIZERS)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_what_a_precision_comes_to_is_in_its_record(mode: Mode) -> None:
    for granularity in get_args(Granularity) if mode.has_granularity else ("block",):
        config = Config(precision=mode.name, rollout_granularity=granularity)
        terms = Terms.of(config, "torch")
        assert (terms.format, terms.backend) == (config.format, "torch" if mode.trains_fp8 else "")
        assert terms.weight_dtype == (config.format.sent if config.format else "bfloat16")
        assert (config.resolved_align, config.resolved_smoothing) == (mode.align, mode.smoothing)
        assert (config.format is not None) == config.quantized_rollout == bool(mode.formats)


def test_what_settings_come_to_together() -> None:
    for kernel in ("auto", "triton", "flash3"):
        assert Config(exact_attention=kernel).resolved_attention == kernel
        assert kernel == "flash3" or Config(exact_attention=kernel, kv_cache="fp8").resolved_attention == "triton"
    rollout = Config(precision="fp8-rollout")
    assert rollout.replace(router_replay="R3").returns_routes and rollout.replace(measure_routes=True).returns_routes
    assert not rollout.returns_routes
    assert {name for name in MODES if Config(precision=name).same_log_probs} == {"fp8-unified", "fp16"}
    assert not Config(precision="fp8-unified", align="linear").same_log_probs


def test_every_setting_has_a_group_and_is_told_apart() -> None:
    assert {found.group for found in SETTINGS.values()} == set(GROUPS)
    assert all(found.doc and (found.choices == ()) != (found.form is WORD) for found in SETTINGS.values())


NAMES = st.from_regex(r"[a-z_*?]{1,8}(\.[a-z0-9_*]{1,8}){0,3}", fullmatch=True)


@given(
    precision=st.sampled_from(["bf16", "fp8-unified", "fp8-rollout"]),
    align=st.sampled_from([None, "exact", "linear"]),
    scale_format=st.sampled_from(["pow2", "fp32"]),
    exclude=st.lists(NAMES, max_size=4),
    backend=st.sampled_from(["auto", "native", "torch"]),
    platform=st.sampled_from(["auto", "cpu", "cuda"]),
    sync=st.sampled_from(["full", "delta"]),
    sync_timeout=st.floats(min_value=1e-6, max_value=1e9),
    fp8_all_gather=st.booleans(),
    audit_fraction=st.floats(0, 1),
    on_mismatch=st.sampled_from(["stop", "recompute"]),
    monitor_every=st.integers(1, 1000),
    monitor_layers=st.booleans(),
    monitor_sqnr=st.floats(-100, 100),
    monitor_underflow=st.floats(0, 1),
    monitor_action=st.sampled_from(["warn", "stop"]),
    guard_sqnr=st.none() | st.floats(-100, 100),
    correction=st.sampled_from(KINDS),
    cap=st.none() | st.floats(min_value=1, max_value=1e9),
    acr=st.booleans(),
    optimizer_states=st.sampled_from(["fp32", "8bit", "fp8"]),
    resume_any=st.booleans(),
)
def test_the_environment_carries_every_setting_exactly(**fields: Any) -> None:
    if fields["precision"] != "fp8-unified":
        fields["align"] = fields["guard_sqnr"] = None
    if fields["precision"] == "bf16":
        fields["sync"] = "full"
    fields["fp8_all_gather"] &= fields["precision"] == "fp8-unified" and fields["optimizer_states"] == "fp32"
    fields["fp8_all_gather"] &= fields["guard_sqnr"] is None
    cap = fields.pop("cap")
    if cap is not None and fields["correction"] != "none":
        fields["correction_bounds"] = (1 / cap, cap) if CORRECTIONS[fields["correction"]].bounds == (2,) else cap
    fields["acr"] &= fields["correction"] == "tis"
    config = Config(**fields)
    exported = config.to_env()
    assert set(exported) == {environment.SWITCH, *environment.FIELDS}
    stale = dict.fromkeys(environment.FIELDS, "stale")
    assert Config.from_env({**stale, **exported}) == config
    assert environment.opted_in(exported)


def test_what_stands_above_the_environment_is_judged_together_with_it() -> None:
    config = Config.from_env({"JETRL_CORRECTION_BOUNDS": "4", "JETRL_ACR": "1"}, correction="tis")
    assert (config.correction_bounds, config.acr) == ((4.0,), True)
    with pytest.raises(ConfigError, match="unknown setting corection"):
        Config.from_env({}, corection="tis")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bugs_of_other_projects_are_fixed_in_every_mode_but_bf16(precision: Precision) -> None:
    config = Config(precision=precision)
    assert config.upstream_fixes is None and config.fixes_upstream is (precision != "bf16")
    for asked in (True, False):
        told = config.replace(upstream_fixes=asked)
        assert told.fixes_upstream is asked == told.resolved().fixes_upstream
        assert (told.resolved() == config.resolved()) is (config.fixes_upstream is asked)


def test_empty_variables_count_as_not_set() -> None:
    assert Config.from_env({}) == Config()
    assert Config.from_env(dict.fromkeys(environment.FIELDS, " ")) == Config()
    for text, value in (("auto", "auto"), ("1", True), ("false", False)):
        assert Config.from_env({"JETRL_DECODE_GRAPHS": text}).decode_graphs == value
        assert Config.from_env(Config(decode_graphs=value).to_env()).decode_graphs == value
    assert Config.from_env({"JETRL_EXCLUDE": "lm_head, mlp.gate"}).exclude == ("lm_head", "mlp.gate")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"JETRL_PRECISON": "bf16"}, "unknown environment variable JETRL_PRECISON. Use JETRL_PRECISION, or"),
        ({"JETRL_PRECISION": "fp9"}, "unknown precision 'fp9'"),
        ({"JETRL_ALIGN": "exact", "JETRL_PRECISION": "bf16"}, "contradicts"),
        ({"JETRL_SYNC_TIMEOUT": "five"}, "JETRL_SYNC_TIMEOUT='five' is not a number of seconds"),
        ({"JETRL_SYNC_TIMEOUT": "-5"}, "positive, finite"),
        ({"JETRL_MONITOR_EVERY": "often"}, "JETRL_MONITOR_EVERY='often' is not a whole number"),
        ({"JETRL_MONITOR_LAYERS": "all"}, "JETRL_MONITOR_LAYERS='all' is neither on nor off"),
        ({"JETRL_DECODE_GRAPHS": "maybe"}, "JETRL_DECODE_GRAPHS='maybe' is neither on nor off"),
        ({"JETRL_EXCLUDE": "a,,b"}, "empty name part"),
        ({"JETRL_CORRECTION": "tis", "JETRL_CORRECTION_BOUNDS": "two"}, "'two' is neither a cap nor low,high"),
        ({"JETRL_ACR": "maybe"}, "JETRL_ACR='maybe' is neither on nor off"),
        ({"JETRL_UPSTREAM_FIXES": "all"}, "JETRL_UPSTREAM_FIXES='all' is neither on nor off"),
    ],
)
def test_a_wrong_environment_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_env(environ)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("environ", "answer"),
    [
        ({}, False),
        ({"JETRL_ALIGN": "exact"}, False),
        ({"JETRL_PRECISION": ""}, False),
        ({"JETRL_PRECISION": "bf16"}, True),
        ({"JETRL_ENABLED": "1"}, True),
        ({"JETRL_ENABLED": "ON"}, True),
        ({"JETRL_ENABLED": "0", "JETRL_PRECISION": "bf16"}, False),
        ({"JETRL_ENABLED": "false"}, False),
    ],
)
def test_opting_in(environ: dict[str, str], answer: bool) -> None:
    assert environment.opted_in(environ) is answer


def test_a_switch_that_is_neither_on_nor_off() -> None:
    with pytest.raises(ConfigError, match="JETRL_ENABLED='maybe' is neither on nor off"):
        environment.opted_in({"JETRL_ENABLED": "maybe"})


def test_reading_a_variable_that_is_not_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETRL_CACHE_DIR", " there ")
    assert environment.read_variable("JETRL_CACHE_DIR") == "there"
    with pytest.raises(ConfigError, match=r"add it to config/environment\.py"):
        environment.read_variable("JETRL_OTHER")


ANYTHING = st.sampled_from(
    (None, True, False, -1, 0, 1, 0.5, 1e9, float("nan"), "", "x", "0.5", (), ("mlp.*",), (0.5, 2.0), (2.0, 0.5), {}, b"x")
)


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_any_settings_are_accepted_as_a_whole_or_refused_in_one_line(data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.sampled_from(sorted(SETTINGS)), max_size=5), label="names")
    fields = {}
    for name in sorted(chosen):
        words = SETTINGS[name].choices
        fields[name] = data.draw(st.sampled_from(words) | ANYTHING if words else ANYTHING, label=name)
    try:
        config = Config(**fields)
        resolved = config.resolved()
    except ConfigError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert "\n" not in said and said.endswith(".") and len(said) < 400
        return
    assert Config.from_env(config.to_env()) == config
    assert resolved.resolved() == resolved == Config.from_env(resolved.to_env())
