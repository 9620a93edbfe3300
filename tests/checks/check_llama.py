"""After `plan tune --model llama`: a 2-layer model of the preset's shape, compiled in this fresh process.

It must hit every group and be no further from float64 than eager.

    python tests/checks/check_llama.py [--db URL]

Exits with status 1 on a miss, a fallback, or a larger error. pytest does not collect it: it needs the tuned database.
"""

from __future__ import annotations

import argparse
import copy
import sys
from typing import Any

import torch

import fuseplan.planner
from fuseplan.planner.models.build import Model, build_model, cache_name
from fuseplan.planner.models.sources import find_source, workloads_for
from fuseplan.planner.models.workload import Workload


def logits(model: Model, module: torch.nn.Module, workload: Workload, wide: bool = False) -> torch.Tensor:
    """One forward pass on the workload's example inputs, the same for every call."""
    torch.manual_seed(0)
    args, kwargs = model.example(workload)
    if wide and (name := cache_name(kwargs)):
        for layer in kwargs[name].layers:
            layer.keys, layer.values = layer.keys.double(), layer.values.double()
    with torch.no_grad():
        output: Any = module(*args, **kwargs)
    return output.logits.double()


def distance(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--db")
    options = {"on_miss": "unfused"} | ({"db": db} if (db := parser.parse_args().db) else {})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = find_source(model="llama", device_type=device, layers=2)
    model = build_model(source, device)
    exact_module = copy.deepcopy(model.module).double()
    failed = False
    for workload in workloads_for(source, device):
        torch._dynamo.reset()
        fuseplan.planner.reset_stats()
        exact = logits(model, exact_module, workload, wide=True)
        eager = distance(logits(model, model.module, workload), exact)
        fast = torch.compile(model.module, backend="fuseplan", options=options)
        fused = distance(logits(model, fast, workload), exact)
        stats = fuseplan.planner.stats()
        ok = stats.misses == 0 and not stats.fallbacks and stats.groups_fused > 0 and fused <= eager
        failed |= not ok
        print(f"{workload.label}: {stats.from_database} of {stats.groups_fused} groups from the database, "
              f"{stats.misses} misses, {len(stats.fallbacks)} fallbacks; error against float64 {fused:.3e}, "
              f"eager {eager:.3e}: {'ok' if ok else 'FAILED'}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
