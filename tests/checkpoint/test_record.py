"""The record of a checkpoint's settings, and the differences that prevent resuming."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError
from jetrl_patch.trainer import record


def test_what_is_written_is_read_again(tmp_path):
    config = Config(exclude=("layers.0", "down_proj"), correction="geo-mis", correction_bounds=(0.5, 2.0))
    record.write(tmp_path / "new" / "folder", config)
    assert record.read(tmp_path / "new" / "folder") == config.resolved()
    assert [file.name for file in (tmp_path / "new" / "folder").iterdir()] == [record.FILE]


OTHERS = [
    ({"precision": "fp8-unified"}, {"precision": "bf16"}, "precision='bf16'"),
    ({"precision": "bf16"}, {"precision": "fp8-unified"}, "precision='fp8-unified'"),
    ({"scale_format": "fp32"}, {"scale_format": "pow2"}, "scale_format='pow2'"),
    ({"align": "linear"}, {}, "align='exact'"),
    ({"exclude": ("layers.0",)}, {}, r"exclude=\(\)"),
    ({"kv_cache": "fp8"}, {}, "kv_cache='auto'"),
    ({"on_cut": "bf16"}, {}, "on_cut='refuse'"),
    ({"precision": "fp8-rollout", "rollout_granularity": "channel"}, {"precision": "fp8-rollout"}, "'block'"),
    ({"precision": "int8-rollout"}, {"precision": "int8-rollout", "smoothing": 0.0}, "smoothing=0.0"),
    ({"precision": "bf16", "head_dtype": "float32"}, {"precision": "bf16"}, "head_dtype='auto'"),
]


@pytest.mark.parametrize(("saved", "resumed", "says"), OTHERS)
def test_another_run_is_one_clear_error_unless_it_is_meant(saved, resumed, says, tmp_path):
    record.write(tmp_path, Config(**saved))
    with pytest.raises(ConfigError, match=rf"resuming .*required .*{says}.*found .*resume_any=True"):
        record.check(tmp_path, Config(**resumed))
    record.check(tmp_path, Config(**resumed, resume_any=True))
    record.check(tmp_path, Config(**saved))


@pytest.mark.parametrize("change", [
    {"monitor_every": 3}, {"sync_timeout": 5.0}, {"backend": "torch"}, {"correction": "tis"}, {"resume_any": True},
])  # fmt: skip
def test_what_no_number_of_the_trainer_depends_on_may_change(change, tmp_path):
    record.write(tmp_path, Config())
    record.check(tmp_path, Config(**change))


def test_a_scale_format_that_nobody_uses_does_not_matter(tmp_path):
    record.write(tmp_path, Config(precision="bf16", scale_format="fp32", exclude=("layers.0",)))
    record.check(tmp_path, Config(precision="bf16"))


def test_a_checkpoint_without_a_record_was_saved_in_bf16(tmp_path):
    record.check(tmp_path, Config(precision="bf16"))
    with pytest.raises(ConfigError, match=r"precision='bf16' \(no jetrl.json: saved without jetrl_patch\)"):
        record.check(tmp_path, Config())
    record.check(tmp_path, Config(resume_any=True))
    with pytest.raises(ConfigError, match="optimizer_states='8bit', found 'fp32'"):
        record.check(tmp_path, Config(precision="bf16", optimizer_states="8bit", resume_any=True))


@pytest.mark.parametrize("states", ["fp32", "8bit", "fp8"])
@pytest.mark.parametrize("wanted", ["fp32", "8bit", "fp8"])
def test_states_of_another_kind_cannot_be_loaded_whatever_is_meant(states, wanted, tmp_path):
    record.write(tmp_path, Config(optimizer_states=states))
    config = Config(optimizer_states=wanted, resume_any=True)
    record.check(tmp_path, config, optimizer=False)
    if states == wanted:
        record.check(tmp_path, config)
    else:
        with pytest.raises(ConfigError, match=f"Set optimizer_states='{states}', or load the checkpoint without"):
            record.check(tmp_path, config)


@given(cut=st.integers(0, 400))
def test_a_record_that_is_cut_short_is_an_error_that_names_it(cut, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    record.write(folder, Config())
    text = (folder / record.FILE).read_text()
    (folder / record.FILE).write_text(text[: min(cut, len(text) - 3)])
    with pytest.raises(ConfigError, match=r"jetrl\.json: required the settings .*found"):
        record.read(folder)


def test_a_record_of_a_newer_version_is_read_as_far_as_it_is_known(tmp_path):
    record.write(tmp_path, Config())
    known = json.loads((tmp_path / record.FILE).read_text())
    known["settings"]["from_the_future"] = 1
    (tmp_path / record.FILE).write_text(json.dumps(known))
    assert record.read(tmp_path) == Config().resolved()
    known["settings"]["precision"] = "fp4"
    (tmp_path / record.FILE).write_text(json.dumps(known))
    with pytest.raises(ConfigError, match="unknown precision 'fp4'"):
        record.check(tmp_path, Config())
