"""The end of a long-lived process of a pool: it answers jobs until its pipe is closed."""

from __future__ import annotations

import os
import pickle
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from autoplan.profiler.processes import answer_of


def answer_jobs(pipe: Connection, rank: int, world: int) -> NoReturn:
    """Answer each pickled (function, arguments) with function(rank, world, *arguments), and end with the pipe."""

    def run(job: bytes) -> Any:
        fn, args = pickle.loads(job)
        return fn(rank, world, *args)

    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        answer_of(pipe, run, job)
