"""The toy run of ``docs/ten-minutes.md`` on a CPU, as a script: ``python -m examples.ten_minutes verl > toy.sh``.

It starts five steps in verl or OpenRLHF as a user's script does, knows nothing of the plugin and passes its arguments on. The
data is written to ``outputs/ten-minutes/data``.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from examples.common.recipe import Arm, environment
from examples.openrlhf import data as openrlhf_data
from examples.openrlhf import recipe as openrlhf
from examples.verl import data as verl_data
from examples.verl import recipe as verl
from examples.words import TASK
from jetrl_patch._versions import PROGRAMS

#: held-out questions, for OpenRLHF's last step
HELD_OUT = 64
STEPS = 5
#: left out of verl's recipe: what each run sets itself, and the validation, which five steps do not need
_OWN = ("trainer.experiment_name=", "trainer.validation_data_dir=", "trainer.val_before_train=", "trainer.logger=", "hydra.run")


def arguments(framework: str, out: Path) -> list[str]:
    """Write the data below ``out``; return the framework's arguments."""
    arm = Arm(precision="bf16")
    if framework == "verl":
        train, held_out = verl_data.write(out / "data", TASK, HELD_OUT)
        recipe = verl.Recipe(steps=STEPS, validate_every=-1)
        found = [word for word in verl.overrides(recipe, arm, train, held_out, out) if not word.startswith(_OWN)]
        return [*found, "trainer.val_before_train=False", 'trainer.logger=["console"]', f"hydra.run.dir={out / 'hydra'}"]
    train, held_out = openrlhf_data.write(out / "data", TASK, HELD_OUT, arm.seed)
    return openrlhf.arguments(openrlhf.Recipe(steps=STEPS), arm, train, held_out, out)


def variables(framework: str, out: Path) -> dict[str, str]:
    """The variables that a run on a CPU needs, without the folders of temporary files."""
    found = environment(verl.Recipe(), out)
    if framework == "openrlhf":
        found["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return {name: value for name, value in found.items() if os.environ.get(name) != value and not name.endswith("TMPDIR")}


def script(framework: str, out: Path) -> str:
    """The text of the script."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(variables(framework, out).items()))
    command = " \\\n  ".join(["exec python -m " + PROGRAMS[framework], *map(shlex.quote, arguments(framework, out)), '"$@"'])
    return f"#!/usr/bin/env bash\n{exports}{command}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=("verl", "openrlhf"))
    print(script(parser.parse_args().framework, Path("outputs/ten-minutes").resolve()), end="")


if __name__ == "__main__":
    main()
