"""The stored plans of regions, as far as they can be used, and those of other versions of the software timed again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from fuseplan.planner.graph.dataflow import Region
from fuseplan.planner.groups.canonical import has_free_constants
from fuseplan.planner.groups.regions import exact_form, parts_to_plan, region_parts, split_common
from fuseplan.planner.implementations.choices import Implementations
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.tunable_group import TunableGroup, group_subject
from fuseplan.planner.partition.by_inductor import decided_whole
from fuseplan.planner.partition.plan_check import RefusedPlanError, accepted_plan
from fuseplan.planner.partition.plan_record import region_label
from fuseplan.planner.partition.whole_region import last_word
from fuseplan.search import policy
from fuseplan.search.errors import OWN_FAULTS
from fuseplan.search.store.database import Database, Lookup
from fuseplan.search.store.layered import LayeredDatabase
from fuseplan.search.store.record import Evidence, PlanRecord, RecordKey, TuningRecord, Versions, now
from fuseplan.search.tune.tuner import Tuner

logger = logging.getLogger(__name__)
_SOFTWARE = {one.name for one in fields(Versions)}
#: Begins what a renewal adds to the reason of a plan.
_AGAIN = "; timed again"


@dataclass(eq=False)
class StoredPlans:
    """Looks plans up in ``store``, and checks that a hit can be the region's plan here.

    ``context`` is a key with the device, regime and numerics of all. ``keep`` stores an earlier version's plan by the
    region's key of now. With ``any_version`` other versions of the software are no miss. By region key: ``refused``
    says why found plans are not used, ``outdated`` which versions differ.
    """

    store: Database | LayeredDatabase
    context: RecordKey
    implementations: Implementations
    keep: Callable[[PlanRecord], None] | None = None
    any_version: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    outdated: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: Plans that were checked, and what was accepted of them, by region key.
    _sound: dict[str, tuple[PlanRecord, PlanRecord]] = field(default_factory=dict)

    def key(self, region_key: str) -> RecordKey:
        return replace(self.context, workload=region_key)

    def find_all(self, table: GroupTable, regions: Iterable[Region]) -> dict[str, Lookup[PlanRecord]]:
        """Asked for all at once."""
        by_key, known = {self.key(region.key): region for region in regions}, set(self.refused)
        found = {
            key.workload: self._checked(table, by_key[key], lookup)
            for key, lookup in self.store.get_plans(by_key).items()
        }
        for name, older in self._exactly(table, [by_key[self.key(name)] for name, one in found.items() if not one.hit]):
            if older.hit is not None or found[name].record is None:
                found[name] = older
        for key in self.refused.keys() - known:
            label = region_label(table.graph, by_key[self.key(key)])
            logger.warning("the stored plan of %s is not used: %s", label, self.refused[key])
        return found

    def hits(self, table: GroupTable, regions: Iterable[Region]) -> dict[str, PlanRecord]:
        """Plans that can be used, by region key."""
        return {key: one.hit for key, one in self.find_all(table, regions).items() if one.hit is not None}

    def split(
        self, table: GroupTable, regions: Sequence[Region], anew: bool
    ) -> tuple[list[Region], dict[str, PlanRecord]]:
        """Regions with their :meth:`hits`, those without one in pieces where their layer has one, or ``anew``."""
        found = self.hits(table, regions)
        pieces = {one: split_common(table.graph, one) for one in regions if one.key not in found}
        if apart := [piece for each in pieces.values() if len(each) > 1 for piece in each]:
            found |= self.hits(table, apart)
        whole = {one for one, each in pieces.items() if not anew and each[-1].key not in found}
        return [piece for one in regions for piece in ((one,) if one in whole else pieces.get(one, (one,)))], found

    def unmeasured(
        self, table: GroupTable, regions: Iterable[Region], known: Collection[str], ways: Implementations,
        is_probed: bool,
    ) -> list[Region]:
        """What of ``regions``, plans of some of which are ``known``, is planned where nothing is measured: the parts of
        one without a plan, or all of it where the cost model decides more than these.
        """
        graph, listed = table.graph, list(regions)
        missed = [one for one in listed
                  if one.key not in known and one.key not in self.refused and len(region_parts(graph, one)) > 1]
        found = self.hits(table, (part for one in missed for part in region_parts(graph, one)))
        whole = set(decided_whole(table, missed, ways, is_probed, found))
        return [piece for one in listed for piece in ((one,) if one in whole else parts_to_plan(graph, one, known))]

    def _exactly(self, table: GroupTable, regions: Iterable[Region]) -> Iterator[tuple[str, Lookup[PlanRecord]]]:
        """What earlier versions stored, whose keys depend on every constant, with the keys that regions have now."""
        changed = (one for one in regions if has_free_constants(table.graph, one.ops))
        exact = {self.key((old := exact_form(table.graph, one)).key): (old, one) for one in changed}
        for key, lookup in self.store.get_plans(exact).items():
            if lookup.record is not None:
                old, region = exact[key]
                lookup = self._checked(table, region, replace(lookup, record=_moved(lookup.record, old, region)))
                if lookup.hit is not None and self.keep is not None:
                    self.keep(lookup.hit)
                yield region.key, lookup

    def just_written(self, table: GroupTable, regions: Iterable[Region]) -> dict[str, Lookup[PlanRecord]]:
        """Plans, undecided ones too, that another process has just stored with the same software, checked like any hit.
        """
        by_key = {self.key(region.key): region for region in regions}
        return {
            key.workload: self._checked(table, by_key[key], replace(lookup, mismatch=()))
            for key, lookup in self.store.get_plans(by_key).items() if _SOFTWARE.isdisjoint(lookup.mismatch)
        }

    def _checked(self, table: GroupTable, region: Region, lookup: Lookup[PlanRecord]) -> Lookup[PlanRecord]:
        """The look-up, or one that found nothing where a hit cannot be the region's plan."""
        names = tuple(one for one in lookup.mismatch if one in _SOFTWARE)
        if self.any_version and names == lookup.mismatch:
            lookup = replace(lookup, mismatch=())
        if names and (lookup.hit is not None or not lookup.shipped):
            self.outdated[region.key] = names
        if lookup.hit is None:
            return lookup
        stored, accepted = self._sound.get(region.key, (None, None))
        if stored == lookup.hit:
            return replace(lookup, record=accepted)
        try:
            accepted = accepted_plan(table, self.implementations, region, lookup.hit)
            self._sound[region.key] = lookup.hit, accepted
            return replace(lookup, record=accepted)
        except Exception as error:  # whatever else the check trips over: it costs this region alone
            OWN_FAULTS.tolerate(error)
            reason = str(error) if isinstance(error, RefusedPlanError) else f"its check failed: {type(error).__name__}"
        self.refused.setdefault(region.key, reason)
        return Lookup()


def _moved(record: PlanRecord, old: Region, region: Region) -> PlanRecord:
    """A record of ``old`` with the positions that its ops have in ``region``; -1 for what it does not have."""
    place = {at: region.ops.index(name) for at, name in enumerate(old.ops)}

    def moved(ops: Iterable[int]) -> tuple[int, ...]:
        return tuple(place.get(at, -1) for at in ops)

    groups = tuple(replace(one, ops=moved(one.ops)) for one in record.groups)
    rejected = tuple(replace(one, ops=moved(one.ops)) for one in record.rejected)
    return replace(record, groups=groups, rejected=rejected, key=replace(record.key, workload=region.key))


@dataclass(eq=False)
class Renewal:
    """Times plans of other versions of torch, triton, the driver or fuseplan again; they are not searched.

    Each kernel is compiled, checked against float64 and timed shortly; then the region runs beside plain ATen. Where
    kernels are right and about as fast as before, and ATen's ops no faster, the plan is stored with the versions of
    now.
    """

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
        if not verdict.keeps or verdict.failed:
            return None
        slower = f": its kernels take {min(ratios):.2f}x to {max(ratios):.2f}x as long" if ratios else ""
        names = " and ".join(tuner.versions.mismatch(older.evidence.versions))
        words = f"{_AGAIN} with another version of {names}{slower}{verdict.words}"
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
        evidence, versions=tuner.versions, created=now(), run=tuner.run,
        reason=evidence.reason.partition(_AGAIN)[0] + words)
