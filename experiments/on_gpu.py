"""Everything that only a GPU can show, in one command: `python -m experiments.on_gpu`, see `experiments.gpu.run`."""

from __future__ import annotations

from experiments.gpu.run import main
from experiments.shared.measure import run_command

if __name__ == "__main__":
    run_command(main)
