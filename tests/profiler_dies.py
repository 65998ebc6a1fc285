"""`autoplan profile` whose second node dies, or hangs, while collectives are measured. See test_profiler.py."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from autoplan.cli import main
from autoplan.profiler import run

_measure_links = run.measure_links
_HANGS = sys.argv.pop(1) == "hangs"
_HANG_S = 90.0  # then it ends, so that nothing is left behind


def _fails(*args: Any, **options: Any) -> Any:
    if os.environ["GROUP_RANK"] == "1":
        time.sleep(_HANG_S if _HANGS else 0.0)
        os._exit(3)
    return _measure_links(*args, **options)


run.measure_links = _fails
main()
