"""Options of the suite."""

import hypothesis
import pytest

# no test asserts a time, also not by accident on a loaded machine
hypothesis.settings.register_profile("autoplan", deadline=None)
hypothesis.settings.load_profile("autoplan")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the emitted text that tests compare with")
