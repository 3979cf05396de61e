"""Import directions, public names, and who may read the environment."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.house import graph, imports, layers

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS = ("transformers", "vllm", "verl", "ray", "openrlhf", "deepspeed", "tensordict")


def loaded_by(statement: str) -> set[str]:
    """The top-level modules loaded in a fresh process after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("JETRL_", "COV"))}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, cwd="/")
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def modules(*parts: str) -> list[str]:
    """Dotted names of all modules in a folder of the core."""
    folder = ROOT.joinpath("jetrl_patch", *parts)
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(folder.rglob("*.py"))]
    return [name.removesuffix(".__init__") for name in names]


def test_import_jetrl_patch_loads_nothing() -> None:
    found = loaded_by("import jetrl_patch")
    assert not found & {"torch", "wrapt", "packaging", "typer", *FRAMEWORKS}


def test_the_patch_engine_and_the_runtime_know_no_framework() -> None:
    single = ("session", "snapshot", "config", "config.environment", "errors", "native.machine", "registry", "progress")
    names = [*modules("patching"), *(f"jetrl_patch.{name}" for name in single)]
    found = loaded_by(f"import {', '.join(names)}, jetrl_patch.registry, jetrl_patch.cli.main")
    assert "packaging" in found  # the control: a process that loads something says so
    assert not found & {"torch", "numpy", *FRAMEWORKS}


@pytest.mark.parametrize("folder", ["backends", "fp8", "exact", "native", "sync", "measure"])
def test_the_core_knows_torch_and_no_framework(folder: str) -> None:
    found = loaded_by(f"import {', '.join(modules(folder))}")
    assert "torch" in found
    assert not found & set(FRAMEWORKS)


@pytest.mark.parametrize("framework", ["transformers", "vllm", "verl", "cpu", "ray"])
def test_an_adapter_is_made_without_its_framework(framework: str) -> None:
    found = loaded_by(f"import jetrl_patch.adapters.{framework}.adapter as a; a.ADAPTER")
    assert not found & set(FRAMEWORKS)


@pytest.mark.parametrize("entry", ["jetrl_patch.adapters.vllm.entry", "jetrl_patch.adapters.verl.entry"])
def test_an_entry_point_does_nothing_unless_opted_in(entry: str) -> None:
    call = f"import {entry} as e\ngetattr(e, 'register', lambda: None)()\nfrom jetrl_patch import session as runtime\n"
    found = loaded_by(call + "assert not runtime.is_active()")
    assert not found & {"torch", *FRAMEWORKS}


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_adapters_never_import_one_another() -> None:
    for path in python_files("adapters"):
        own = path.relative_to(ROOT / "adapters").parts[0].removesuffix(".py")
        for name in imports(path):
            parts = name.split(".")
            assert parts[0] != "adapters", f"{path}: import it as jetrl_patch.adapters"
            if parts[:2] == ["jetrl_patch", "adapters"] and len(parts) > 2:
                assert parts[2] == own, f"{path} imports {name}; use jetrl_patch.registry"


def stand(module: str, names: Sequence[str]) -> int:
    """The layer of a module: that of the longest listed name that is the module or contains it; -1 if there is none."""
    short = module if module == "jetrl_patch" else module.removeprefix("jetrl_patch.")
    around = [name for name in names if short == name or short.startswith(f"{name}.")]
    return list(names).index(max(around, key=len)) if around else -1


def test_every_module_has_a_place_and_imports_nothing_above_it() -> None:
    names = layers()
    assert len(names) == len(set(names)) <= 22
    edges = graph()
    assert {module for module in edges if stand(module, names) < 0} == set()
    upward = {
        f"{module} imports {other}: {names[stand(module, names)]} stands below {names[stand(other, names)]}"
        for module, others in edges.items()
        for other in others
        if stand(other, names) > stand(module, names)
    }
    assert upward == set()


def test_no_circle() -> None:
    """Of modules, which is more than of packages."""
    graphlib.TopologicalSorter(graph()).prepare()  # raises CycleError, which names the circle


def test_the_list_is_read_with_care() -> None:
    assert stand("jetrl_patch.kernels.formats", layers()) < stand("jetrl_patch.native.ops", layers())
    assert stand("jetrl_patch.kernels.gemm", layers()) < stand("jetrl_patch.fp8.linear", layers())
    assert stand("jetrl_patch.registry", layers()) < stand("jetrl_patch.adapters.verl.sync", layers())
    assert stand("jetrl_patch.nobody", layers()) == -1
    edges = graph()
    assert "jetrl_patch.backends" in edges["jetrl_patch.trainer.source"], "an import inside a function"
    assert "jetrl_patch.measure.parity" in edges["jetrl_patch.registry"], "a type alone"


def test_only_the_registry_imports_adapters_by_name() -> None:
    for path in python_files("jetrl_patch"):
        for name in imports(path):
            assert not name.startswith("jetrl_patch.adapters"), f"{path} imports {name}"
        text = path.read_text()
        if path.name not in ("registry.py", "discovery.py"):  # the latter has the name of the entry-point group
            assert '"jetrl_patch.adapters' not in text, path


def test_only_env_reads_our_variables() -> None:
    for path in [*python_files("jetrl_patch"), *python_files("adapters")]:
        if path == ROOT / "jetrl_patch" / "config" / "environment.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv", "environ.get"):
                read = ast.unparse(node.args[0])
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                read = ast.unparse(node.slice)
            else:
                continue
            assert "JETRL_" not in read, f"{path}:{node.lineno} reads {read}; that belongs in jetrl_patch/config/environment.py"


def test_public_names_are_pinned() -> None:
    import jetrl_patch

    assert jetrl_patch.__all__ == [
        "AuditError",
        "Config",
        "ConfigError",
        "ConflictError",
        "JetrlError",
        "ModelError",
        "NotPatchedError",
        "PatchError",
        "PrecisionError",
        "Status",
        "SyncError",
        "VersionError",
        "__version__",
        "disable",
        "enable",
        "status",
    ]
    for name in jetrl_patch.__all__:
        assert getattr(jetrl_patch, name) is not None
    assert dir(jetrl_patch) == sorted(jetrl_patch.__all__)
    with pytest.raises(AttributeError, match="no attribute 'enabel'"):
        jetrl_patch.enabel  # noqa: B018


def test_public_functions_stay_functions_whatever_is_imported_first() -> None:
    for first in ("jetrl_patch.session", "jetrl_patch.registry", "jetrl_patch.config"):
        loaded_by(f"import {first}, jetrl_patch\nassert callable(jetrl_patch.status) and callable(jetrl_patch.Config)")


def test_the_adapters_folder_refuses_its_source_name() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import adapters"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
    )
    assert run.returncode == 1
    assert "installed as jetrl_patch.adapters" in run.stderr


def test_every_error_of_the_project_has_one_root() -> None:
    from jetrl_patch import errors

    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type):
            assert issubclass(kind, errors.JetrlError)
