"""Compiling a random program with fuseplan, through ``torch.compile`` or by a shorter way, and judging the results."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import sympy
import torch
from program_judging import complaints
from programs import Program
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses import CrossRefFakeMode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fuseplan.planner
from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.implementations.first_call import GroupCall
from fuseplan.planner.runtime import executor
from fuseplan.planner.runtime.dispatch import fuseplan as backend
from fuseplan.planner.runtime.placement import fused_graph

#: Reasons that are no answer but a failure of ours: an exception's name, a compiler, a kernel's first call.
_FAILED = re.compile(r"^(planning failed|tracing|first call failed|\w*(Error|Exception)\b)")

#: What tracing says about a size that depends on data.
_READS_DATA = "data-dependent expression"
#: What a program is set aside for.
_NOT_OURS = "set aside: PyTorch's fake tensors get a shape of the program wrong"


@dataclass(frozen=True)
class Outcome:
    """What became of a program: complaints, and how many groups were fused or fell back, by reason.

    ``ops`` are those of the fused groups, each with the dtype of its first number.
    """

    seed: int
    complaints: tuple[str, ...]
    fused: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    ops: frozenset[tuple[str, str]] = frozenset()


def run_program(program: Program, options: Mapping[str, Any], through_dynamo: bool) -> Outcome:
    """Compile a program, call it, and judge it.

    Args:
        program: The program; a dynamic one is called with both of its sets of sizes.
        options: Options of the back end.
        through_dynamo: Compile with ``torch.compile``. Else the back end gets a graph of one call, through which it
            traces; the second sizes are then left out where they break what the graph assumes of sizes.
    """
    outcome = _run(program, options, through_dynamo)
    if not through_dynamo and any(_READS_DATA in text for text in outcome.complaints):
        return _run(program, options, True)  # Dynamo ends its graph where Python reads a number from a tensor
    return outcome


def _run(program: Program, options: Mapping[str, Any], through_dynamo: bool) -> Outcome:
    fuseplan.planner.reset_stats()
    given = {**options, "numerics": program.numerics}
    found: list[str] = []
    with torch.no_grad(), warnings.catch_warnings(), _fused_ops() as ops:
        warnings.simplefilter("ignore")
        try:
            run = _with_dynamo(program, given) if through_dynamo else _directly(program, given)
            calls = (0, 1) if program.dynamic else (0,)
            for call in calls:
                arguments = program.arguments(call)
                results = run(call, arguments)
                if results is not None:
                    found += [f"call {call}: {text}" for text in complaints(program, call, results, arguments)]
                    # Once more, after first calls: memory may be reused now, and the fallbacks are out of the way.
                    arguments = program.arguments(call)
                    results = run(call, arguments)
                    found += [f"call {call} again: {text}" for text in complaints(program, call, results, arguments)]
        except Exception as error:
            found.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
    stats = fuseplan.planner.stats()
    found += [f"{number} x {reason}" for reason, number in stats.fallbacks.items() if _FAILED.match(reason)]
    if found and _fakes_differ(program):
        return Outcome(program.seed, (), fallbacks={_NOT_OURS: 1})
    return Outcome(program.seed, tuple(dict.fromkeys(found)), stats.groups_fused, dict(stats.fallbacks), frozenset(ops))


def _fakes_differ(program: Program) -> bool:
    """Whether PyTorch itself says of an op of a program that it gives another shape than it does."""
    try:
        with torch.no_grad(), CrossRefFakeMode(check_strides=False, check_aliasing=False):
            program.function()(*program.arguments(0))
    except Exception:
        return True
    return False


@contextlib.contextmanager
def _fused_ops() -> Iterator[set[tuple[str, str]]]:
    """Collects the ops of the groups that kernels compute."""
    found: set[tuple[str, str]] = set()

    def place(traced: Traced, groups: Sequence[GroupCall]) -> Any:
        for node in (traced.graph.op(name) for group in groups for name in group.ops):
            dtypes = [traced.graph.specs[value].dtype for value in node.inputs or node.outputs]
            found.add((node.op, next((dtype for dtype in dtypes if dtype != "bool"), "bool")))
        return fused_graph(traced, groups)

    with mock.patch.object(executor, "fused_graph", place):
        yield found


#: ``run(call, arguments)``: the results, None where the compiled graph does not hold for the sizes of this call.
_Run = Callable[[int, Sequence[torch.Tensor]], Sequence[torch.Tensor] | None]


def _with_dynamo(program: Program, options: Mapping[str, Any]) -> _Run:
    torch._dynamo.reset()
    compiled = torch.compile(program.function(), backend="fuseplan", dynamic=program.dynamic, options=dict(options))
    return lambda call, arguments: compiled(*arguments)


def _directly(program: Program, options: Mapping[str, Any]) -> _Run:
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    context = TracingContext(mode)
    examples = program.arguments(0)
    for example in examples:
        dims = [DimDynamic.DUCK if program.dynamic and size > 1 else DimDynamic.STATIC for size in example.shape]
        context.tensor_to_context[example] = StatelessSymbolicContext(dims)  # type: ignore[abstract]
    with tracing(context):
        compiled = backend(_as_one_call(program), examples, options=dict(options))
        fakes = [mode.from_tensor(one, symbolic_context=context.tensor_to_context[one]) for one in examples]

    def run(call: int, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        if call and not _holds(environment, fakes, arguments):
            return None
        results: Sequence[torch.Tensor] = compiled(*arguments)
        return results

    return run


def _as_one_call(program: Program) -> fx.GraphModule:
    """A graph that calls the program: the back end traces through it, as through a graph of Dynamo's."""
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(f"x{number}") for number in range(len(program.inputs)))
    graph.output(graph.call_function(program.function(), inputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def _holds(environment: ShapeEnv, fakes: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> bool:
    """Whether a graph traced with ``fakes`` may be called with ``arguments``."""
    bound: dict[Any, int] = {}
    pairs = [
        (expected, actual)
        for fake, argument in zip(fakes, arguments, strict=True)
        for expected, actual in zip((*fake.shape, *fake.stride()), (*argument.shape, *argument.stride()), strict=True)
    ]
    for expected, actual in pairs:
        if isinstance(expected, torch.SymInt) and expected.node.expr.is_Symbol:
            bound.setdefault(expected.node.expr, actual)
    for expected, actual in pairs:
        value = expected.node.expr.subs(bound) if isinstance(expected, torch.SymInt) else expected
        if value != actual:
            return False
    return all(guard.expr.subs(bound) == sympy.true for guard in environment.guards)
