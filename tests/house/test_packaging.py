"""The package as users meet it: its names, what an import loads, and the wheel."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import typer

import autoplan
from autoplan.versions import TRIED, not_tried

ROOT = Path(__file__).resolve().parents[2]
# Each folder at the top and the package it is imported as.
PACKAGES = {
    "autoplan": "autoplan",
    "cost_models": "autoplan.cost_models",
    "profiles": "autoplan.profiles",
    "runtime": "autoplan.runtime",
}


def run_python(code: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )


def modules_loaded_by(code: str) -> set[str]:
    done = run_python(f"{code}\nimport sys\nprint(*sys.modules)")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def import_all_of(package: str) -> str:
    """But for the kernels where there is no Triton: `autoplan.runtime.fused` imports them where there is."""
    return (
        f"import importlib, importlib.util, pkgutil, {package} as package\n"
        "for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    if '.triton_' not in found.name or importlib.util.find_spec('triton'):\n"
        "        importlib.import_module(found.name)"
    )


def test_the_doors_names_are_exactly_the_public_ones():
    public = (
        "AutoplanError CheckpointError Cluster ParallelConfig ParallelModel Plan PlanRequest PowerSGD Profile "
        "RankFailure StepLog __version__ capacity compile estimate_config "
        "experts_forward explain export_plan fit load_model parallelize plan pools read_config rehearse rule "
        "search_plan size whatif"
    ).split()
    assert autoplan.__all__ == public
    assert dir(autoplan) == public


@pytest.mark.parametrize("name", [name for name in autoplan.__all__ if name != "__version__"])
def test_every_name_of_the_door_loads(name):
    assert getattr(autoplan, name).__name__ == name


def test_an_unknown_name_of_the_door_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'autoplan' has no attribute 'paralellize'"):
        autoplan.paralellize  # noqa: B018


@pytest.mark.parametrize("name", ["cost_models", "runtime", "profiles"])
def test_the_bare_name_is_refused(name):
    done = run_python(f"import {name}")
    assert done.returncode != 0
    assert f"ImportError: the {name.replace('_', ' ')}" in done.stderr
    assert f"autoplan.{name}, not" in done.stderr


def test_importing_autoplan_loads_no_torch():
    assert not modules_loaded_by("import autoplan") & {"torch", "pulp", "numpy", "pandas"}


def test_the_cost_models_load_no_torch():
    loaded = modules_loaded_by(import_all_of("autoplan.cost_models"))
    assert "autoplan.cost_models" in loaded
    assert not loaded & {"torch", "spmd_types", "transformers"}


def test_the_runtime_loads_no_planner():
    loaded = modules_loaded_by(import_all_of("autoplan.runtime"))
    assert "autoplan.runtime" in loaded
    assert not loaded & {"pulp", "highspy", "autoplan.api", "autoplan.plans", "autoplan.search", "autoplan.cost_models"}


def test_pyproject_allows_exactly_the_versions_that_were_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    allowed = {re.split(r"[<>=]", line)[0]: line for line in declared} | {"Python": project["requires-python"]}
    for name, (least, most) in TRIED.items():
        after = ".".join(map(str, [*most[:-1], most[-1] + 1]))
        between = f">={'.'.join(map(str, least))},<{after}"
        assert allowed[name] == (name if name != "Python" else "") + between
    (pinned,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert not_tried({"torch": pinned.partition("==")[2]}) is None


@pytest.mark.parametrize(
    ("versions", "line"),
    [
        ({"torch": "2.13.0+cpu"}, None),
        ({"torch": "2.15.7", "Python": "3.13.11", "spmd_types": "0.3.1"}, None),
        ({"torch": "2.12.1", "Python": "3.12.0"}, "torch 2.12.1 (tried: 2.13 to 2.15)"),
        ({"torch": "2.16.0.dev20261101+cpu"}, "torch 2.16.0.dev20261101+cpu (tried: 2.13 to 2.15)"),
        ({"torch": "3.0"}, "torch 3.0 (tried: 2.13 to 2.15)"),
        (
            {"spmd_types": "0.3.2", "Python": "3.14.0"},
            "spmd_types 0.3.2 (tried: 0.3.1), Python 3.14.0 (tried: 3.11 to 3.13)",
        ),
    ],
)
def test_versions_outside_of_what_was_tried_are_named(versions, line):
    assert not_tried(versions) == (line and f"autoplan was not tried with {line}")


def test_an_import_says_in_one_line_that_a_version_was_not_tried(tmp_path):
    """Once in a job, without loading the package, and not at all if it was tried."""
    assert run_python("import autoplan").stderr == ""
    (tmp_path / "torch-9.0.dist-info").mkdir()
    (tmp_path / "torch-9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.0\n")
    code = "import sys, autoplan, autoplan.ir.graph; print('torch' in sys.modules)"
    done = run_python(code, PYTHONPATH=str(tmp_path))
    assert done.stderr == "autoplan was not tried with torch 9.0 (tried: 2.13 to 2.15)\n"
    assert done.stdout == "False\n"
    assert run_python(code, PYTHONPATH=str(tmp_path), RANK="1").stderr == ""


def test_the_packages_on_disk_are_exactly_the_ones_in_pyproject():
    on_disk = {
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for folder, package in PACKAGES.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(on_disk) == declared


def test_the_wheel_holds_the_whole_package_and_the_profiles(tmp_path):
    # Built from a copy: setuptools leaves a build/ folder behind, and its stale files would hide a missing one.
    source = tmp_path / "source"
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ["pyproject.toml", "LICENSE"]:
        shutil.copy(ROOT / file, source)
    (source / "profiles" / "probe.json").write_text("{}")

    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path]
    done = subprocess.run([*build, source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("autoplan-*.whl")
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)

    expected = {"autoplan/py.typed"}
    for folder, package in PACKAGES.items():
        for path in (source / folder).rglob("*"):
            if path.suffix in {".py", ".json", ".csv", ".gz", ".html", ".j2"}:
                expected.add(f"{package.replace('.', '/')}/{path.relative_to(source / folder).as_posix()}")
    assert "autoplan/profiles/probe.json" in expected
    shipped = {path.relative_to(unpacked).as_posix() for path in (unpacked / "autoplan").rglob("*") if path.is_file()}
    assert shipped == expected
    assert {path.name for path in unpacked.iterdir()} == {"autoplan", f"autoplan-{autoplan.__version__}.dist-info"}

    # A user's own folders of the same names must not get in the way.
    user = tmp_path / "user"
    for name in ["cost_models", "runtime", "profiles"]:
        (user / name).mkdir(parents=True)
        (user / name / "__init__.py").touch()
    code = (
        "import autoplan.cost_models, autoplan.runtime, importlib.resources as r\n"
        "print(autoplan.runtime.__file__, r.files('autoplan.profiles').joinpath('probe.json').read_text())"
    )
    done = run_python(code, cwd=user, PYTHONPATH=str(unpacked))
    assert done.stdout.split() == [str(unpacked / "autoplan" / "runtime" / "__init__.py"), "{}"], done.stderr


WITHOUT_TORCH = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("torch", "spmd_types", "transformers"):
            raise ModuleNotFoundError(f"no {name} here", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.slow
def test_the_source_archive_installs_and_plans_without_torch(tmp_path):
    """Source archive, wheel of it, a new environment with the other dependencies: its `autoplan` answers there."""
    source = tmp_path / "source"
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    done = run_python(build, cwd=source)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("autoplan-*.tar.gz")

    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AUTOPLAN"))}
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    (packages,) = environment.glob("lib/python*/site-packages")
    pip_wheel = [sys.executable, *"-m pip wheel --no-deps --no-build-isolation --no-index -w".split(), tmp_path]
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--no-deps"]
    done = subprocess.run([*pip_wheel, archive], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("autoplan-*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")  # for every system, without a compiler
    install = [*pip, "--no-index", str(wheel)]  # what PYTHONPATH has may look installed
    done = subprocess.run(install, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # The dependencies come from this environment; what an editable install puts into its path stays out.
    (packages / "others.pth").write_text(f"{Path(typer.__file__).parents[1]}\n")
    (packages / "sitecustomize.py").write_text(WITHOUT_TORCH)

    words = ["plan", "gpt2", "--cluster", "4xh100", "--pin", "tp=1", "--pin", "pp=1"]
    command = [environment / "bin" / "autoplan", *words]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "FITS" in done.stdout, done.stderr
    asked = "import autoplan; print(autoplan.__file__); import torch"
    done = subprocess.run(
        [environment / "bin" / "python", "-c", asked], cwd=tmp_path, env=clean, capture_output=True, text=True
    )
    assert done.stdout.strip().startswith(str(environment)) and "no torch here" in done.stderr
