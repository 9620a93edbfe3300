"""Plans that were measured with other versions of torch, triton, the driver or fuseplan: timed again, and not searched.

Each kernel is compiled, checked against float64 and timed shortly; then the region runs beside plain ATen. Where the
kernels are right, about as fast as they were, and no slower than ATen's ops, the plan stands, with the versions of now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fuseplan.planner.graph.dataflow import Region
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.tunable_group import TunableGroup, group_subject
from fuseplan.planner.partition.whole_region import last_word
from fuseplan.planner.tuning.stored_plans import StoredPlans
from fuseplan.search import policy
from fuseplan.search.store.record import Evidence, PlanRecord, TuningRecord, now
from fuseplan.search.tune.tuner import Tuner


@dataclass(eq=False)
class Renewal:
    """Renews the plans that ``stored`` has of other versions; ``renewed`` says of which regions, by key."""

    stored: StoredPlans
    renewed: dict[str, PlanRecord] = field(default_factory=dict)

    def older(self, table: GroupTable, region: Region) -> PlanRecord | None:
        """A plan of other versions that can be the region's."""
        of_any = replace(self.stored, keep=None, any_version=True, refused={}, outdated={})
        return of_any.hits(table, [region]).get(region.key)

    def renew(self, table: GroupTable, region: Region, tuner: Tuner) -> PlanRecord | None:
        """The plan with the versions of now, stored; None where there is none, or it does not stand."""
        older = self.older(table, region)
        kernels = None if older is None else self._kernels(table, region, older)
        if older is None or kernels is None:
            return None
        new = [(subject, record) for subject, record in kernels if record.evidence.versions != tuner.versions]
        ratios = [
            (trial.median_us or float("inf")) / record.fused.median_us
            for trial, (_, record) in zip(tuner.time_again(new), new, strict=True) if record.fused is not None
        ]
        if any(ratio > policy.RECHECK_TOLERANCE for ratio in ratios):
            return None
        parts = [(region, older)]
        verdict = last_word(table, region, parts, self.stored.implementations, tuner, decided=False)()
        if not verdict.keeps:
            return None
        slower = f": its kernels take {min(ratios):.2f}x to {max(ratios):.2f}x as long" if ratios else ""
        names = " and ".join(tuner.versions.mismatch(older.evidence.versions))
        words = f"; timed again with another version of {names}{slower}{verdict.words}"
        for _, record in new:
            tuner.database.put_record(replace(record, evidence=_of_now(record.evidence, tuner)))
        found = replace(older, evidence=_of_now(older.evidence, tuner, words))
        tuner.database.put_plan(found)
        self.renewed[region.key] = found
        return found

    def _kernels(
        self, table: GroupTable, region: Region, plan: PlanRecord
    ) -> Sequence[tuple[TunableGroup, TuningRecord]] | None:
        """What the plan's kernels are and rest on; None where not all records are there."""
        found: dict[str, tuple[TunableGroup, TuningRecord]] = {}
        for group in (one for one in plan.groups if one.is_kernel):
            key = self.stored.key(group.workload)
            record = self.stored.store.get_record(key).record
            if record is None or (record.backend, dict(record.config)) != (group.implementation, dict(group.config)):
                return None
            ops = [region.ops[at] for at in group.ops]
            subject = group_subject(table.graph, ops, group.workload, key.numerics, table.device_type)
            found[group.workload] = subject, record
        return list(found.values())


def _of_now(evidence: Evidence, tuner: Tuner, words: str = "") -> Evidence:
    return replace(
        evidence, versions=tuner.versions, created=now(), run=tuner.run, reason=evidence.reason + words)
