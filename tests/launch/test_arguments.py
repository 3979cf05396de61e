"""Which words belong to jetrl and which to the program."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jetrl_patch import registry
from jetrl_patch.config import arguments
from jetrl_patch.config.arguments import FLAG, Launch
from jetrl_patch.errors import ConfigError
from jetrl_patch.patching.guards import file_of


def split(command: str, words: list[str]) -> Launch:
    return arguments.split(command, words, registry.programs())


#: words that a careless parser would take for an option of jetrl, Python or click, or would drop
TRICKY = [
    "",
    "-",
    "--",
    "-m",
    "-h",
    "--help",
    "--set",
    "--precision=bf16",
    "--align",
    "exact",
    "--fp8",
    "\udcff",
]
WORDS = st.lists(st.one_of(st.sampled_from([*TRICKY, FLAG]), st.text()))


def without_flag(words):
    """The words that must reach the program: only the flag before a lone ``--`` is taken out."""
    end = words.index("--") if "--" in words else len(words)
    return tuple([word for word in words[:end] if word != FLAG] + words[end:])


@given(WORDS)
@example(["--", FLAG, "--"])
@example([FLAG, FLAG])
def test_behind_the_program_only_the_flag_is_taken(words):
    for head, target, is_module in (
        (["x.py"], "x.py", False),
        (["-m", "a.b"], "a.b", True),
        (["--", "-x"], "-x", False),
    ):
        launch = split("run", [*head, *words])
        assert (launch.target, launch.is_module) == (target, is_module)
        assert launch.arguments == without_flag(words)
        flagged = launch.arguments != tuple(words)
        assert launch.overrides == ({"precision": "fp8-unified"} if flagged else {})


def parsed(command, words):
    """The launch, or why there is none."""
    try:
        return split(command, words)
    except ConfigError as error:
        return str(error).partition(":")[2]


@given(WORDS)
def test_the_short_forms_are_the_long_ones(words):
    first = "trainer.n=1"
    for command, module in registry.programs().items():
        head = ["--precision", "fp8-unified", "--set=exclude=a,b"]
        assert parsed(command, [*head, first, *words]) == parsed("run", [*head, "-m", module, first, *words])
    assert split("verl", ["--help"]).help and split("verl", ["--precision", "bf16", "-h"]).help
    assert split("verl", ["trainer.n=1", "--help"]).arguments == ("trainer.n=1", "--help")
    assert split("openrlhf", ["--actor.num_nodes", "1"]).arguments == ("--actor.num_nodes", "1")


def test_our_options_come_before_the_program():
    launch = split(
        "run", [FLAG, "--align=linear", "--correction", "none", "--set", "sync_timeout=7", "x.py", "--align", "q"]
    )
    found = {"precision": "fp8-unified", "align": "linear", "correction": "none", "sync_timeout": 7.0}
    assert launch.overrides == found
    assert launch.arguments == ("--align", "q")


def test_a_correction_with_its_bounds():
    words = ["--correction", "tis", "--correction-bounds=3", "--acr", FLAG, "x.py"]
    assert split("run", words).overrides == {
        "correction": "tis", "correction_bounds": (3.0,), "acr": True, "precision": "fp8-unified",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("item", "name", "value"),
    [
        ("exclude=layers.0,down_proj", "exclude", ("layers.0", "down_proj")),
        ("exclude=", "exclude", ()),
        ("sync_timeout=12", "sync_timeout", 12.0),
        ("precision=bf16", "precision", "bf16"),
        ("backend=torch", "backend", "torch"),
        ("correction_bounds=0.5,5", "correction_bounds", (0.5, 5.0)),
        ("acr=on", "acr", True),
    ],
)
def test_set_gives_each_field_its_type(item, name, value):
    found = split("run", ["--set", item, "x.py"]).overrides
    assert found == {name: value} and type(found[name]) is type(value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "required -m MODULE or a script, found neither"),
        (["-m"], "found neither"),
        ([FLAG, ""], "found neither"),
        (["--precison", "bf16", "x.py"], "found --precison"),
        (["-x", "x.py"], "found -x"),
        (["--align"], "end of the line"),
        (["--precision", "fp9", "x.py"], "--precision fp9: unknown precision 'fp9'"),
        (["--precision", "", "x.py"], "required a value of precision"),
        (["--precision=fp32", "x.py"], "unknown precision 'fp32'"),
        (["--align", "none", "x.py"], "unknown align 'none'"),
        (
            ["--correction", "tiss", "x.py"],
            "--correction tiss: unknown correction 'tiss'. Set it to one of 'none', 'tis'",
        ),
        (["--correction-bounds", "two", "x.py"], "--correction-bounds two: JETRL_CORRECTION_BOUNDS='two' is neither"),
        (["--set", "acr=perhaps", "x.py"], "neither on nor off"),
        (["--set", "exclude", "x.py"], "found no '='"),
        (["--set", "exclud=a", "x.py"], "unknown setting 'exclud'. Use exclude, or another name"),
        (["--set", "sync_timeout=soon", "x.py"], "--set sync_timeout=soon: "),
        (["--set", "sync_timeout=-1", "x.py"], "must be a positive"),
        (["--set", "align=", "x.py"], "required a value of align"),
        (["--precision", "bf16", "x.py", FLAG], "found --precision bf16 and --fp8-unified"),
        (["--set", "align=exact", "--align", "linear", "x.py"], "found --set align=exact and --align linear"),
    ],
)
def test_what_is_wrong_is_said(words, says):
    with pytest.raises(ConfigError) as caught:
        split("run", words)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        ("verl", ["--fp8-unifed", "trainer.nnodes=1"], "jetrl verl: required no option of jetrl's here, found --fp8-unifed"),
        ("verl", ["trainer.nnodes=1", "--align", "linear"], "found --align. Write --align before the program's arguments"),
        ("verl", [FLAG, "trainer.nnodes=1", "--align=linear"], "found --align"),
        ("verl", ["--fp8_unified", "a=1"], "found --fp8_unified"),
        ("verl", ["a=1", "-fp8-unified"], "found -fp8-unified. Write --fp8-unified before"),
        ("openrlhf", ["--train.seed", "1", "--corection", "tis"], "found --corection. Write --correction before"),
        ("run", ["x.py", "--fp8-unifed"], "jetrl run: required no option of jetrl's here, found --fp8-unifed"),
    ],
)
def test_a_misspelt_option_starts_no_unpatched_run(command, words, says):
    with pytest.raises(ConfigError) as caught:
        split(command, words)
    assert says in str(caught.value)


def test_options_of_the_programs_are_not_taken_for_ours():
    """Hydra's, all of OpenRLHF's, and those of a user's script."""
    from hydra._internal.utils import get_args_parser

    theirs = [name for action in get_args_parser()._actions for name in action.option_strings]
    assert split("verl", ["a=1", *theirs]).arguments == ("a=1", *theirs)
    flags = re.findall(r'"(--[\w.]+)"', file_of("openrlhf", "cli", "train_ppo_ray.py").read_text())
    assert len(flags) > 100 and split("openrlhf", flags).arguments == tuple(flags)
    assert split("run", ["x.py", "--align", "left", "--set=1"]).arguments == ("--align", "left", "--set=1")
    assert split("verl", ["a=1", "--", "--fp8-unifed"]).arguments == ("a=1", "--", "--fp8-unifed")
