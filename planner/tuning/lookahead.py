"""Looks ahead of a tune, while that waits for the device: enumerates coming regions, and has their kernels compiled."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from fuseplan.planner.cost.prices import ModelPrices
from fuseplan.planner.errors import RefusedError
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.regions import is_anchor, region_parts
from fuseplan.planner.implementations.choices import Choice, Implementations, RegionProblem
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.inductor import compile_ahead, start_compilers
from fuseplan.planner.implementations.tunable_group import TunableGroup
from fuseplan.planner.partition.by_inductor import step_groups
from fuseplan.planner.partition.guided_loop import Prices, predicted_partition
from fuseplan.planner.partition.whole_region import opaque_parts
from fuseplan.search.errors import OWN_FAULTS
from fuseplan.search.tune.tuner import Tuner

_log = logging.getLogger(__name__)

#: How long the thread may keep the interpreter while the tune wants it.
_INTERVAL_S = 0.0002


@dataclass(eq=False)
class Lookahead:
    """Prepares regions in order, on a thread that ends with the context, and has ``tuner`` compile their kernels.

    ``search`` is the guided loop: rehearsed with predictions, it shows which groups will be measured.
    """

    make_problem: Callable[[GroupTable, Region], RegionProblem]
    make_prices: Callable[[GroupTable], ModelPrices]
    make_table: Callable[[DataflowGraph], GroupTable]
    search: Callable[[RegionProblem, Prices], object]
    tuner: Tuner
    is_minor: Callable[[GroupTable, Region], bool]
    make_joint: Callable[[GroupTable, Region], RegionProblem | None]

    def __post_init__(self) -> None:
        self._tables: dict[int, GroupTable] = {}
        self._problems: dict[Region, Future[RegionProblem]] = {}
        self._sent: set[str] = set()
        #: The kernels of nominal covers of whole regions.
        self._wanted: dict[Region, list[TunableGroup]] = {}
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lookahead")

    def __enter__(self) -> Lookahead:
        # Each time the tune waits for a worker it gives the interpreter away, and would get it back a long slice later.
        self._interval_s = sys.getswitchinterval()
        sys.setswitchinterval(_INTERVAL_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        sys.setswitchinterval(self._interval_s)

    def table(self, graph: DataflowGraph) -> GroupTable:
        """The one table of a graph."""
        return self._tables.setdefault(id(graph), self.make_table(graph))

    def ask_inductor(self, graph: DataflowGraph, step: Sequence[Region], ways: Implementations) -> None:
        """Start TorchInductor's compilers, and let it compile a whole ``step`` beside what is measured until then."""
        self.tuner.run_aside(start_compilers)
        if step and ways.inductor.compiled_for == "default":  # max-autotune would use the device
            with suppress(RefusedError):
                table = self.table(graph)
                opaque = [choice.group.ops[0] for choice in opaque_parts(table, ways)]
                for _, group in step_groups(table, step, opaque, ways):
                    self.tuner.compile_aside(compile_ahead, ways.inductor.subject(table, group))

    def send(self, graph: DataflowGraph, regions: Sequence[Region]) -> None:
        """Prepare the islands of these regions, after those that were sent before; each key once."""
        for part in (part for region in regions for part in region_parts(graph, region)):
            if part.key not in self._sent and not is_anchor(graph, part):
                self._sent.add(part.key)
                table = self.table(graph)
                self._problems[part] = self._pool.submit(self.make_problem, table, part)
                self._pool.submit(self._quietly, self._compile_ahead, self._problems[part], table, part)

    def send_whole(self, graph: DataflowGraph, regions: Iterable[Region]) -> None:
        """Compile kernels around matmuls of these regions, after what was sent before."""
        for region in regions:
            self._pool.submit(self._quietly, self._compile_around_anchors, self.table(graph), region)

    def remind(self, region: Region) -> None:
        """Compile kernels around a region's matmuls again as they are best known now: others alike may be searched."""
        self.tuner.prefetch(self._wanted.pop(region, ()))

    def problem(self, region: Region) -> RegionProblem | None:
        """The prepared problem of exactly this part, or what preparing it raised; None where none was sent."""
        future = self._problems.get(region)
        return future.result() if future is not None else None

    def _quietly(self, compile_ahead: Callable[..., object], *args: object) -> None:
        """A tune without it is only slower."""
        try:
            compile_ahead(*args)
        except Exception as error:
            OWN_FAULTS.tolerate(error)
            _log.warning("the kernels of a region are not compiled ahead: %s: %s", type(error).__name__, error)

    def _compile_around_anchors(self, table: GroupTable, region: Region) -> None:
        """First the nominal cover's: those will be searched. Of the others any may be measured."""
        problem = self.make_joint(table, region)
        if problem is not None:
            self._wanted[region] = self._compile_cover(problem, table, self.make_prices(table))
            groups = sorted((one.group for one in problem.choices if one.implementation.backends),
                            key=lambda group: -len(group.ops))
            self.tuner.prefetch_default(map(table.subject, groups))

    def _compile_ahead(self, prepared: Future[RegionProblem], table: GroupTable, region: Region) -> None:
        if prepared.exception() is not None:  # told to who asks for the problem
            return
        problem = prepared.result()
        prices, minor = self.make_prices(table), self.is_minor(table, region)
        self._compile_cover(problem, table, prices, minor)
        if not minor:  # else nothing is measured beside the cover
            rehearsal = _Rehearsal(prices)
            self.search(problem, rehearsal)
            self.tuner.prefetch_default(table.subject(choice.group) for choice in rehearsal.asked)

    def _compile_cover(
        self, problem: RegionProblem, table: GroupTable, prices: ModelPrices, minor: bool = False
    ) -> list[TunableGroup]:
        """Compile what will be tried of the kernels of the nominal cover, and give them."""
        cover = predicted_partition(problem, prices.nominal_s)
        if self._stop.is_set():  # in the meantime
            return []
        kernels = [table.subject(one.choice.group) for one in cover.chosen if one.choice.implementation.backends]
        self.tuner.prefetch(kernels, minor, spare=True)
        return kernels


@dataclass(eq=False)
class _Rehearsal:
    """Takes predictions for measurements."""

    prices: ModelPrices
    asked: list[Choice] = field(default_factory=list)

    def bound_s(self, choice: Choice) -> float:
        return self.prices.bound_s(choice)

    def measure_s(self, choices: Sequence[Choice]) -> list[float]:
        self.asked += [choice for choice in choices if choice.implementation.backends]
        return [self.prices.predict_s(choice) for choice in choices]
