"""Sample records for the database tests."""

from __future__ import annotations

import json
from typing import Any

import report_samples

from fuseplan.search.store.record import (
    Alternative,
    Evidence,
    Finalist,
    GroupChoice,
    Measurement,
    PlanRecord,
    RecordKey,
    Rejection,
    TuningRecord,
    Versions,
)

#: A measured device, as it is stored.
SPEC: dict[str, Any] = json.loads(report_samples.SPEC.to_json())
HERE = Versions("0.1.0", "2.13.0", "3.9.0", "580.1")


def evidence(created: str = "2026-11-20T10:00:00+00:00", versions: Versions = HERE) -> Evidence:
    return Evidence(created, versions, 7, 1.5, {"core": 2600.0}, "the kernel takes 50.0% less time")


def tuning(workload: str = "w1", device: str = "cpu-a", us: float = 5.0, **changes: object) -> TuningRecord:
    time = Measurement(us, 0.1, 20, 20, "eager", 0.004)
    unfused = Measurement(10.0, 0.2, 20, 20, "eager", 0.004)
    config = {"threads": 2, "col_tile": 1024}
    fields: dict[str, object] = {
        "key": RecordKey(workload, device),
        "label": f"swiglu {workload}",
        "fuse": True,
        "backend": "cpp",
        "config": config,
        "fused": time,
        "unfused": unfused,
        "gain": 0.5,
        "default_gain": 0.0,
        "threshold": 0.01,
        "error": 1e-8,
        "eager_error": 2e-8,
        "finalists": (Finalist("unfused", "", {}, unfused, 0.0), Finalist("default", "cpp", config, time, 0.5)),
        "rejected": (Rejection("cpp", {"threads": 8}, "crashed: killed by SIGSEGV"),),
        "refusals": {"triton": "is for cuda, not cpu"},
        "enumerated": 40,
        "compiled": 6,
        "measured": 5,
        "resources": {},
        "evidence": evidence(),
    }
    return TuningRecord(**(fields | changes))  # type: ignore[arg-type]


def plan(workload: str = "r1", device: str = "cpu-a", **changes: object) -> PlanRecord:
    fields: dict[str, object] = {
        "key": RecordKey(workload, device, "graph", "eager"),
        "label": "layer",
        "groups": (
            GroupChoice((0, 1), "cpp", "w1", "swiglu", {"threads": 2}, 6.0, 4.0, 5.0),
            GroupChoice((2,), "mkl", label="linear", predicted_us=30.0),
        ),
        "planned_us": 35.0,
        "unfused_us": 45.0,
        "margin": 1 - 35 / 45,
        "predicted_us": 36.0,
        "rejected": (Alternative((1, 2), "mul+linear", "extern ops are not absorbed", None, None),),
        "enumerated": 12,
        "measured": 3,
        "gap": 0.0,
        "peak_bytes": 4096,
        "unfused_peak_bytes": 8192,
        "evidence": evidence(),
    }
    return PlanRecord(**(fields | changes))  # type: ignore[arg-type]
