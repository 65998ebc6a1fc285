"""The package as users meet it: its names, what an import loads, and the wheel."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import autoplan

ROOT = Path(__file__).resolve().parents[1]
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
    return (
        f"import importlib, pkgutil, {package} as package\n"
        "for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(found.name)"
    )


def test_the_doors_names_are_exactly_the_public_ones():
    public = (
        "Cluster ParallelConfig ParallelModel Plan PlanRequest PowerSGD Profile __version__ capacity estimate_config "
        "load_model parallelize search_plan whatif"
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
    assert not loaded & {"pulp", "highspy", "autoplan.api", "autoplan.plan", "autoplan.search", "autoplan.cost_models"}


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
            if path.suffix in {".py", ".json", ".csv", ".gz"}:
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
