"""What dispatch did in this process: groups by origin, misses, and every fallback with its reason.

>>> from fuseplan.planner.dispatch_stats import reset_stats, stats
>>> reset_stats()
>>> stats().groups_fused
0
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from fuseplan.planner.module_paths import Paths, located, place
from fuseplan.search.errors import OWN_FAULTS, counted

#: Where a region's plan came from.
Source = Literal["database", "tuned", "model", "unfused"]


def _told(noun: str, rest: str, plural: str = "") -> int:
    """A count that people are told in these words, where it is not 0."""
    number: int = field(default=0, metadata={"words": (noun, rest, plural)})
    return number


@dataclass(frozen=True)
class CompileStats:
    """One graph that went through the back end.

    Attributes:
        compile_id: Dynamo's id of the compilation (``"0/1"``: frame 0, first recompile), or a name for a graph that
            did not come from ``torch.compile``.
        regions: Regions of the graph.
        from_database: Fused groups whose plan was looked up.
        from_tuned: Fused groups whose plan was tuned now.
        from_model: Fused groups whose plan rests on the cost model.
        unfused: Groups that a plan wanted fused and that run as ATen ops; ``fallbacks`` says why.
        planned_unfused: Regions whose answer is "do not fuse".
        misses: Regions that the database did not know.
        bucketed: Regions answered by the plan of a neighbouring size of the token dimension.
        lookup_s: Seconds spent planning, look-ups included.
        fallbacks: Groups, regions, graphs or calls that run unfused, by reason.
        notes: What was asked for and is not done although kernels run (a CUDA graph, a direct launch), by reason.
        places: Where in the model what ``fallbacks`` and ``notes`` count is, by reason, as far as that is known.
    """

    compile_id: str = ""
    regions: int = 0
    from_database: int = 0
    from_tuned: int = 0
    from_model: int = 0
    unfused: int = 0
    planned_unfused: int = 0
    misses: int = 0
    bucketed: int = 0
    lookup_s: float = 0.0
    whole_by_inductor: int = _told("graph", "as a whole by TorchInductor's code, which was measured to be faster")
    library_calls: int = _told("op", "by a library's call that is faster than ATen's default")
    quarantined: int = _told("stored plan is", "unsound and not used; `plan tune` measures anew", "stored plans are")
    in_place: int = _told("output", "reusing input buffers")
    grouped_queries: int = _told("attention call", "without a copy of keys for every query head")
    dropped_masks: int = _told("constant attention mask", "removed")
    added_masks: int = _told("attention call", "with numbers for a mask, computed once")
    copied_masks: int = _told("attention call", "with a copy of its mask that fused kernels can read, made once")
    uncopied_operands: int = _told("attention call", "without copies of its operands")
    paged_attention: int = _told("attention call", "on the pages of a cache where they lie")
    capped_attention: int = _told("attention call", "with capped scores as one op")
    channels_last: int = _told("convolution", "with channels last in memory")
    merged_projections: int = _told("group", "of linear ops as one, on packed weights")
    recordings: int = _told("CUDA graph", "recorded")
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def groups_fused(self) -> int:
        """Groups that run as one kernel."""
        return self.from_database + self.from_tuned + self.from_model


@dataclass(frozen=True)
class Stats(CompileStats):
    """Totals over every graph compiled in this process since :func:`reset_stats`; ``compiles`` has each alone."""

    compiles: tuple[CompileStats, ...] = ()

    def __str__(self) -> str:
        """A few lines for people."""
        lines = [
            f"{counted(len(self.compiles), 'graph')}, {counted(self.regions, 'region')}: "
            f"{counted(self.groups_fused, 'group')} fused ({self.from_database} from the database, {self.from_tuned} "
            f"tuned now, {self.from_model} by the model)",
            counted(self.misses, "miss, ", "misses, ") + counted(
                sum(self.fallbacks.values()), "group, region, graph or call",
                "groups, regions, graphs or calls") + " fell back to unfused ops",
        ]
        lines += [f"  {self._named(reason, count)}" for reason, count in sorted(self.fallbacks.items())]
        told = ((getattr(self, one.name), one.metadata.get("words")) for one in fields(self))
        lines += [f"{counted(number, words[0], words[2])} {words[1]}" for number, words in told if words and number]
        lines += [f"note: {self._named(reason, count)}" for reason, count in sorted(self.notes.items())]
        return "\n".join(lines)

    def _named(self, reason: str, count: int) -> str:
        return located(f"{count} x {reason}", self.places.get(reason, ""))


_COUNTED = tuple(f.name for f in fields(CompileStats) if f.name not in ("compile_id", "fallbacks", "notes", "places"))


class Tally:
    """Counts of one compilation while they grow. A kernel that fails in its first call is counted here later."""

    def __init__(self, compile_id: str = "") -> None:
        self.compile_id = compile_id
        self._counts: dict[str, Any] = dict.fromkeys(_COUNTED, 0)
        self._fallbacks, self._notes = Counter[str](), Counter[str]()
        self._paths = defaultdict[str, list[Paths]](list)
        self._lock = threading.Lock()

    def count(self, name: str, number: float = 1) -> None:
        """Add to a counter; ``name`` is an attribute of :class:`CompileStats`."""
        with self._lock:
            self._counts[name] += number

    def fall_back(self, reason: str, source: Source | None = None, paths: Paths = ()) -> None:
        """Count a group that runs unfused; ``source`` is that of a group which was counted as fused before."""
        self.count("unfused")
        if source is not None:
            self.count(f"from_{source}", -1)
        self.refuse(reason, paths)

    def refuse(self, reason: str, paths: Paths = ()) -> None:
        """Count a graph or a region that runs unfused, with ``paths`` of its modules."""
        with self._lock:
            self._fallbacks[reason] += 1
            if paths:  # what happens in calls, without end, has none
                self._paths[reason].append(paths)

    def note(self, reason: str, number: int = 1, paths: Paths = ()) -> None:
        """Something that was asked for is not done; the kernels run all the same."""
        with self._lock:
            self._notes[reason] += number
            self._paths[reason].append(paths)

    def snapshot(self) -> CompileStats:
        """The counts as they stand."""
        with self._lock:
            places = {reason: where for reason, paths in self._paths.items() if (where := place(paths))}
            return CompileStats(self.compile_id, fallbacks=dict(self._fallbacks), notes=dict(self._notes),
                                places=places, **self._counts)


_TALLIES: list[Tally] = []


def new_tally(compile_id: str = "") -> Tally:
    """A tally that :func:`stats` includes."""
    tally = Tally(compile_id)
    _TALLIES.append(tally)
    return tally


def stats() -> Stats:
    """What dispatch did in this process since :func:`reset_stats`."""
    found = total(tuple(tally.snapshot() for tally in list(_TALLIES)))
    faults = {f"worked around a fault of fuseplan's own, {fault}": count for fault, count in OWN_FAULTS.counts.items()}
    return replace(found, notes={**found.notes, **faults})


def total(compiles: tuple[CompileStats, ...]) -> Stats:
    """Sums over compilations."""
    sums = {name: sum(getattr(one, name) for one in compiles) for name in _COUNTED}
    fallbacks, notes, places = Counter[str](), Counter[str](), defaultdict[str, dict[str, None]](dict)
    for one in compiles:
        fallbacks.update(one.fallbacks)
        notes.update(one.notes)
        for reason, where in one.places.items():
            places[reason][where] = None
    joined = {reason: "; ".join(each) for reason, each in places.items()}
    return Stats("all", fallbacks=fallbacks, notes=notes, places=joined, compiles=compiles, **sums)


def reset_stats() -> None:
    """Forget every count."""
    _TALLIES.clear()
    OWN_FAULTS.counts.clear()
