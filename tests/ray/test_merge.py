"""The plugin's part of a ``runtime_env`` with the user's; Ray's own merge accepts the result."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from ray._private import ray_constants
from ray.runtime_env import RuntimeEnv
from ray.runtime_env.runtime_env import _merge_runtime_env

from jetrl_patch.adapters.ray import nodes
from jetrl_patch.adapters.ray.hook import make_hook
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError

CONFIG = Config(exclude=("layers.0",)).resolved()


def own():
    """A user's hook."""


def merged(given, config=CONFIG):
    found, hook = nodes.merge_runtime_env(given, config)
    return {**found, nodes.HOOK: print}, hook


def test_the_name_of_the_hook_variable_is_rays():
    assert nodes.HOOK_VARIABLE == ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR


@pytest.mark.parametrize("nothing", [None, {}, RuntimeEnv(), {"env_vars": None}])
def test_without_a_runtime_env_ours_is_all_there_is(nothing):
    found, hook = merged(nothing)
    assert found == {"env_vars": CONFIG.to_env(), nodes.HOOK: print}
    assert hook is None
    RuntimeEnv(**found)  # Ray validates it


@given(
    variables=st.dictionaries(st.text("ABCXYZ_", min_size=1), st.text()),
    more=st.fixed_dictionaries({}, optional={"working_dir": st.none(), "py_executable": st.just("python -s")}),
    hook=st.sampled_from([None, "os.getcwd", own]),
    kind=st.sampled_from([dict, lambda env: RuntimeEnv(**env)]),
)
def test_what_the_user_gave_stays(variables, more, hook, kind):
    theirs = kind({**more, "env_vars": variables, **({} if hook is None else {nodes.HOOK: hook})})
    before = copy.deepcopy(theirs)
    found, seen = merged(theirs)
    assert found["env_vars"] == {**variables, **CONFIG.to_env()}
    assert seen is hook or seen == hook
    rest = {k: v for k, v in found.items() if k not in ("env_vars", nodes.HOOK)}
    assert rest == {k: v for k, v in before.items() if k not in ("env_vars", nodes.HOOK)}
    assert theirs == before


def test_omegaconf_containers_become_plain():
    theirs = OmegaConf.create({"env_vars": {"A": "1"}, "pip": {"packages": ["x"]}, "py_modules": ["y"]})
    found, _ = merged(theirs)
    assert type(found["env_vars"]) is dict and found["env_vars"]["A"] == "1"
    assert type(found["pip"]) is dict


def test_settings_of_the_users_that_agree_are_no_contradiction():
    agree = {
        "JETRL_ENABLED": "true",
        "JETRL_PRECISION": "fp8-unified",
        "JETRL_ALIGN": "",
        "JETRL_EXCLUDE": " layers.0",
        "JETRL_SYNC_TIMEOUT": "300",
        "JETRL_CACHE_DIR": "/scratch",
    }
    found, _ = merged({"env_vars": agree})
    assert found["env_vars"] == {**CONFIG.to_env(), "JETRL_CACHE_DIR": "/scratch"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JETRL_ENABLED", "0"),
        ("JETRL_EXCLUDE", "layers.1"),
        ("JETRL_ALIGN", "linear"),
        ("JETRL_SYNC_TIMEOUT", "10"),
        ("JETRL_BACKEND", "torch"),
    ],
)
def test_a_setting_of_the_users_that_contradicts_is_named(name, value):
    with pytest.raises(ConflictError, match=f"required {name}=.*found {name}='{value}'"):
        merged({"env_vars": {name: value}})
    with pytest.raises(ConflictError, match=name):
        nodes.take_ours({"env_vars": {name: value}}, CONFIG)


def test_a_misspelt_variable_is_an_error():
    with pytest.raises(ConfigError, match="JETRL_PRECISON"):
        merged({"env_vars": {"JETRL_PRECISON": "bf16"}})


@pytest.mark.parametrize("field", ["container", "image_uri"])
def test_an_image_beside_which_ray_allows_no_hook_is_refused(field):
    with pytest.raises(ConfigError, match=field):
        merged({field: "image"})


@pytest.mark.parametrize("hook", [None, "os.getcwd"])
@pytest.mark.parametrize("place", [nodes.HOOK, nodes.HOOK_VARIABLE])
def test_ray_accepts_ours_beside_a_submitted_job(hook, place):
    """Ray refuses a key that is in both, so the rest of the job's environment and ours share none."""
    job = {"env_vars": {"JETRL_PRECISION": "fp8-unified", "B": "2"}, "working_dir": "gcs://x.zip"}
    if hook:
        (job if place == nodes.HOOK else job["env_vars"])[place] = hook
    rest, seen = nodes.take_ours(job, CONFIG)
    assert seen == hook
    ours, _ = merged({"env_vars": {"C": "3"}})
    both = _merge_runtime_env(rest, ours)
    assert both is not None
    assert both == {
        "working_dir": "gcs://x.zip",
        "env_vars": {"B": "2", "C": "3", **CONFIG.to_env()},
        nodes.HOOK: print,
    }


def test_a_conflict_of_the_users_own_is_left_to_ray():
    rest, _ = nodes.take_ours({"env_vars": {"B": "2"}}, CONFIG)
    ours, _ = merged({"env_vars": {"B": "3"}})
    assert _merge_runtime_env(rest, ours) is None


def test_a_hook_of_another_job_cannot_be_chained():
    with pytest.raises(ConflictError, match="another job"):
        merged({"env_vars": {nodes.HOOK_VARIABLE: "ray_runtime_env_func::abc"}})


def test_our_own_hook_in_an_environment_that_is_handed_on_is_renewed():
    """vLLM does this in a Ray actor for the workers of a tensor-parallel engine."""
    handed_on = {
        "env_vars": {nodes.HOOK_VARIABLE: "ray_runtime_env_func::0100", "A": "1"},
        nodes.HOOK: make_hook("0", {}, None).__name__,
    }
    found, hook = merged(handed_on)
    assert hook is None and found[nodes.HOOK] is print
    assert nodes.HOOK_VARIABLE not in found["env_vars"] and found["env_vars"]["A"] == "1"
