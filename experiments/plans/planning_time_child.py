"""One row of planning_time.py, in a process of its own: plans once and prints what it took, as JSON.

python -m experiments.plans.planning_time_child llama-3.1-8b 8x8xh100-sxm5-80gb 8192 512 300
"""

import time

START = time.perf_counter()

import json  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
from dataclasses import asdict  # noqa: E402

from autoplan.catalog import load_model  # noqa: E402
from autoplan.cost_models.hardware.cluster import Cluster  # noqa: E402
from autoplan.runtime.host_memory import peak_resident_bytes  # noqa: E402
from autoplan.search.planner import PlanRequest, search_plan  # noqa: E402


def main(model: str, machines: str, seq_len: int, batch: int, limit_s: float) -> None:
    """Load, search, print."""
    phases = {"imports": time.perf_counter() - START}
    began = time.perf_counter()
    graph = load_model(model)
    phases["load graph"] = time.perf_counter() - began
    began = time.perf_counter()
    cluster = Cluster.parse(machines)
    phases["cluster"] = time.perf_counter() - began
    result = search_plan(PlanRequest(graph, cluster, seq_len, batch, time_limit_s=limit_s))
    best, certificate = result.plans[0], result.certificate
    phases |= certificate.by_phase_s
    phases["other"] = time.perf_counter() - START - sum(phases.values())
    estimate = best.estimate
    helper = resource.getrusage(resource.RUSAGE_CHILDREN)  # of the search, which has ended
    helper_s, helper_bytes = helper.ru_utime + helper.ru_stime, helper.ru_maxrss * 1024
    print(
        json.dumps(
            {
                "phases_s": phases,
                "total_s": time.perf_counter() - START,
                "processor_s": time.process_time() + helper_s,
                "helper_processor_s": helper_s,
                "peak_rss_bytes": peak_resident_bytes() + helper_bytes,
                "torch_loaded": "torch" in sys.modules,
                "config": asdict(best.config),
                "step_time_s": estimate.step_time_s.mid,
                "mfu": estimate.mfu,
                "memory_bytes": estimate.peak_memory_bytes.mid,
                "breakdown_s": {name: q.mid for name, q in estimate.breakdown.items()},
                "certificate": asdict(certificate),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
