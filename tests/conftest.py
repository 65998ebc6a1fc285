"""Options of the suite."""

import gc
import os
import sys
import time
from collections.abc import Iterator

# two files run at a time, and processes beside each other: threads of one would wait for those of the other
os.environ.setdefault("OMP_NUM_THREADS", "1")

import clocks
import durations
import harness
import hypothesis
import pytest

# nothing is measured while testing but where a test is about measuring: the processes it starts inherit this
os.environ["AUTOPLAN_PROFILE"] = "assumed"
# every search solves its layouts itself, whatever earlier ones left on this machine (tests/search/test_layout_files.py)
os.environ["AUTOPLAN_NO_CACHE"] = "1"

_YOUNG = 10_000  # new objects before the next collection of garbage; Python's default is 700, or 2,000

# no test asserts a time, also not by accident on a loaded machine
hypothesis.settings.register_profile("autoplan", deadline=None)
hypothesis.settings.load_profile("autoplan")


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search of a test is stopped by the time that the machine takes: readings of its clock add next to nothing.

    `clocks.ticking` makes a test's own readings count.
    """
    clocks.ticking(monkeypatch, 1e-9)


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A test that leaves its process group behind fails itself, not those after it that start their own."""
    yield
    left = _ended_group()
    if left is not None:
        pytest.fail(f"the test left a process group of {left} behind; use the fixture one_process, or destroy it")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the worker processes: sums of 16-bit numbers depend on how many threads share them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_process() -> Iterator[None]:
    """For a test that trains in this process: the group that autoplan made ends with the test."""
    yield
    _ended_group()


def _ended_group() -> str | None:
    """Size and backend of this process's group, which is destroyed; None where there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return None
    found = f"{distributed.get_world_size()} ({distributed.get_backend()})"
    distributed.destroy_process_group()
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the emitted text that tests compare with")


def pytest_configure(config: pytest.Config) -> None:
    """Every test sees the same machine, one without GPUs, unless tests that need one are asked for (`-m gpu`)."""
    wanted = str(config.option.markexpr)
    if "gpu" not in wanted or "not gpu" in wanted:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch asks for devices; processes inherit it


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that make test, and those that make test-all has no time for (durations.py)."""
    seconds = durations.measured()
    plain = [item for item in items if not _marked(item, "slow", "exhaustive", "gpu")]
    _mark(plain, pytest.mark.slow, durations.too_many((item.nodeid for item in plain), seconds))
    slow = [item for item in items if _marked(item, "slow") and not _marked(item, "exhaustive", "gpu", "all_cases")]
    _mark(slow, pytest.mark.exhaustive, durations.too_many_slow((item.nodeid for item in slow), seconds))


def pytest_collection_finish() -> None:
    """What was imported and collected is no garbage, and the collector runs less often: it took a twentieth of the
    processor's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])


def _marked(item: pytest.Item, *names: str) -> bool:
    return any(mark.name in names for mark in item.iter_markers())


def _mark(items: list[pytest.Item], mark: pytest.MarkDecorator, those: set[str]) -> None:
    for item in items:
        if item.nodeid in those:
            item.add_marker(mark)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what starts after `AUTOPLAN_TESTS_END` (seconds since 1970; `.ci/run` sets it): the summary counts them."""
    if time.time() > float(os.environ.get("AUTOPLAN_TESTS_END", "inf")):
        pytest.skip("not run: it was past AUTOPLAN_TESTS_END")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Where the next module starts with what needs no processes, idle workers would only slow it down."""
    if nextitem is None or (nextitem.path != item.path and nextitem.get_closest_marker("processes") is None):
        harness.end_pools()
