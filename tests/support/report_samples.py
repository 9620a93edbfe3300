"""A small tuned database made by hand: two workloads, three regions, fused and unfused answers, times one can check."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from curves import curve_of

from fuseplan.costmodel.device import DeviceSpec, Latency, Peak
from fuseplan.costmodel.identity import DeviceIdentity, current_identity
from fuseplan.costmodel.work import Work
from fuseplan.planner.tuning import summary as summaries
from fuseplan.planner.tuning.summary import RegionSummary, WorkloadSummary
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.record import (
    Alternative,
    Evidence,
    GroupChoice,
    Measurement,
    PlanRecord,
    RecordKey,
    TuningRecord,
    Versions,
)

IDENTITY = DeviceIdentity("cpu", "Sample CPU", 2, 32 * 2**20, 0)
DEVICE = IDENTITY.key()
EVIDENCE = Evidence("2026-11-20T10:00:00+00:00", Versions("0.1.0", "2.13.0"), 0, 1.5, {"cpu": 2500.0}, "gain 55 %")

SPEC = DeviceSpec(
    identity=IDENTITY,
    bandwidth=curve_of([(2.0**14, 60.0), (2.0**18, 90.0), (2.0**24, 45.0), (2.0**28, 20.0)]),
    launch={"eager": Latency(4.0, 3.0, "aten.add"), "kernel": Latency(0.5, 0.3, "our own launcher")},
    peaks={"fp32": Peak(1.5e11, 2.0e11), "sfu": Peak(1.0e10, 1.5e10)},
    noise=0.02,
    measured_at="2026-11-20T09:59:00+00:00",
    versions={"torch": "2.13.0"},
)


def time(median_us: float) -> Measurement:
    return Measurement(median_us, 0.1, 9, 9, "eager", 0.02)


def tuning(name: str, label: str, fused_us: float | None, unfused_us: float, work: Work) -> TuningRecord:
    """A record whose answer is to fuse when the kernel is faster."""
    fuse = fused_us is not None and fused_us < unfused_us
    return TuningRecord(
        key=RecordKey(name, DEVICE), label=label, fuse=fuse, backend="cpp" if fused_us is not None else "",
        config={"threads": 2, "col_tile": 1024} if fused_us is not None else {},
        fused=time(fused_us) if fused_us is not None else None, unfused=time(unfused_us),
        gain=1 - fused_us / unfused_us if fused_us is not None else 0.0, default_gain=0.03, threshold=0.02,
        error=1e-7, eager_error=2e-7, finalists=(), rejected=(), refusals={}, enumerated=24, compiled=10, measured=9,
        resources={}, evidence=EVIDENCE, work=work,
    )


SWIGLU = tuning("a" * 64, "silu+mul 32x8192 bfloat16", 40.0, 120.0, Work({"fp32": 1e6, "sfu": 5e5}, 1.5e6, 0, 1))
NORM = tuning("b" * 64, "add+rms_norm 32x2048 bfloat16", 20.0, 90.0, Work({"fp32": 4e5}, 4e5, 1e5, 1))
ROPE = tuning("c" * 64, "cat|neg <rope> 32x32x64 bfloat16", 55.0, 50.0, Work({"fp32": 2e5}, 5e5, 0, 1))


def fused(record: TuningRecord, ops: tuple[int, ...], predicted_us: float) -> GroupChoice:
    return GroupChoice(
        ops, record.backend, record.key.workload, record.label, record.config, predicted_us,
        predicted_us / 2, record.fused.median_us if record.fused else None,
    )


def plan(key: str, label: str, groups: tuple[GroupChoice, ...], planned_us: float, unfused_us: float) -> PlanRecord:
    return PlanRecord(
        RecordKey(key, DEVICE), label, groups, planned_us, unfused_us, 1 - planned_us / unfused_us,
        sum(group.predicted_us for group in groups),
        rejected=(Alternative((0,), "silu alone", "not in the best cover", 30.0, 35.0),),
        enumerated=3, measured=2, gap=0.0, peak_bytes=1000, unfused_peak_bytes=2000, evidence=EVIDENCE,
    )


SWIGLU_PLAN = plan("1" * 64, "silu+mul", (fused(SWIGLU, (0, 1), 36.0),), 40.0, 120.0)
NORM_PLAN = plan("2" * 64, "add+rms_norm", (fused(NORM, (0, 1, 2, 3), 25.0),), 20.0, 90.0)
ROPE_PLAN = plan(
    "3" * 64, "rope",
    (
        GroupChoice((0, 1), "aten", ROPE.key.workload, ROPE.label, predicted_us=48.0, measured_us=50.0),
        GroupChoice((3,), "aten", "", "neg", predicted_us=5.0, measured_us=5.5),
    ),
    55.5, 55.5,
)

REGIONS = (
    RegionSummary("1" * 64, 16, ("silu.default", "mul.Tensor"), ("compute",) * 2, ((0, 1),), ("32x8192 bfloat16",) * 2),
    RegionSummary(
        "2" * 64, 32, ("add.Tensor", "pow.Tensor_Scalar", "mean.dim", "mul.Tensor"), ("compute",) * 4,
        ((0, 1), (1, 2), (2, 3), (0, 3)), ("32x2048 bfloat16",) * 4,
    ),
    RegionSummary(
        "3" * 64, 16, ("mul.Tensor", "add.Tensor", "slice.Tensor", "neg.default"),
        ("compute", "compute", "view", "compute"), ((2, 3), (3, 1), (0, 1)), ("32x32x64 bfloat16",) * 4,
    ),
)
EXTERN_OPS = {"aten.linear.default": 112, "aten.scaled_dot_product_attention.default": 16}


def workload(name: str, regions: tuple[RegionSummary, ...], model: str = "llama") -> WorkloadSummary:
    computes = sum(region.kinds.count("compute") * region.occurrences for region in regions)
    views = sum(region.kinds.count("view") * region.occurrences for region in regions)
    return WorkloadSummary(
        model, name, DEVICE, "eager", "fp32", computes + views + 128, views, 128, EXTERN_OPS, regions
    )


def known_machine(path: Path) -> Path:
    """A database at ``path`` that knows this machine's CPU, by numbers that nobody measured: nothing is probed."""
    identity = current_identity("cpu")
    with Database(path) as database:
        database.put_device(identity.key(), json.loads(replace(SPEC, identity=identity).to_json()))
    return path


def sample_database(path: Path) -> Database:
    """A database at ``path`` with the records above, tuned for model ``llama``."""
    database = Database(path)
    database.put_device(DEVICE, json.loads(SPEC.to_json()))
    for record in (SWIGLU, NORM, ROPE):
        database.put_record(record)
    for one in (SWIGLU_PLAN, NORM_PLAN, ROPE_PLAN):
        database.put_plan(one)
    summaries.store_summary(database, workload("decode b1", REGIONS))
    summaries.store_summary(database, workload("prefill 1x128", REGIONS[:2]))
    database.log_misses([Missed(RecordKey("f" * 64, DEVICE), "gelu 7x13 float32")])
    return database
