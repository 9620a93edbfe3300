"""From a pre-dispatch ATen ``fx.GraphModule`` to a :class:`DataflowGraph`: the one path of planning and dispatch.

Names and devices play no part in the result's meaning: arguments are bound by schema, no-op calls vanish, synonyms get
one spelling, and dynamic sizes are renamed in order of first use.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from fuseplan.planner.capture.arguments import Bound, Storages, TracedTensor, bind_arguments, respell, tensors_in
from fuseplan.planner.capture.mutations import (
    GENERATOR,
    Access,
    functional_twin,
    is_laid_out_alike,
    live,
    order_edges,
    unordered_readers,
)
from fuseplan.planner.capture.sizes import SizeNames
from fuseplan.planner.errors import CaptureError
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.lowering.roundings import Roundings
from fuseplan.planner.ops.table import op_of


@dataclass(frozen=True)
class Traced:
    """A traced graph and its dataflow form.

    Attributes:
        module: Pre-dispatch ATen.
        graph: The normalised graph of ``module``.
        node_of: The FX node that computes each value of ``graph`` (for an op with several results, the op's own node).
        placeholders: Position among the arguments of each tensor input; constants are not in it.
        scalars: The FX node that is a dynamic size among the arguments, or computes a number, by symbol.
        written: Positions among the arguments of tensors whose memory the graph writes to.
    """

    module: fx.GraphModule
    graph: DataflowGraph
    node_of: Mapping[str, fx.Node]
    placeholders: Mapping[str, int]
    scalars: Mapping[str, fx.Node]
    written: frozenset[int]


def normalise(module: fx.GraphModule) -> Traced:
    """The dataflow graph of a pre-dispatch trace with fake values in ``meta["val"]``; CaptureError names an unfit node.
    """
    builder = _Builder(module)
    builder.walk()
    return builder.finish()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


#: Calls that only switch a mode and compute nothing: a traced graph runs without gradients and outside autocast
#: throughout.
MODE_SWITCHES = (
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)


@dataclass
class _Builder:
    root: fx.GraphModule
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    placeholders: dict[str, int] = field(default_factory=dict)
    scalars: dict[str, fx.Node] = field(default_factory=dict)
    #: Names of tensors that the trace holds as attributes; those that are read are graph inputs too.
    constants: set[str] = field(default_factory=set)
    ops: list[OpNode] = field(default_factory=list)
    accesses: dict[str, Access] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    names: SizeNames = field(default_factory=SizeNames)
    storages: Storages = field(default_factory=Storages)
    #: Pairs of ops that must keep their order although no access says so.
    ordered: list[tuple[str, str]] = field(default_factory=list)
    #: Results of ops without operands (``full``, ``arange``).
    from_nothing: set[str] = field(default_factory=set)
    #: What each fx node stands for: a TracedTensor, a size or constant, a tuple of these, or a module.
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fakes = [node.meta.get("val") for node in self.root.graph.nodes]
        devices = Counter(fake.device.type for fake in fakes if isinstance(fake, torch.Tensor))
        self.device = devices.most_common(1)[0][0] if devices else "cpu"

    def walk(self) -> None:
        positions = {node: at for at, node in enumerate(self.root.graph.find_nodes(op="placeholder"))}
        for node in self.root.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node, positions[node])
            elif node.op == "get_attr":
                self.values[node] = self._attribute(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                self.outputs = [leaf.name for leaf in tensors_in(self._resolve(node.args[0]))]
            else:
                raise CaptureError(f"node {node.name} is a {node.op}; only ATen calls can be planned")

    def _placeholder(self, node: fx.Node, position: int) -> Any:
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor):
            self.placeholders[node.name] = position
            return self._define(node.name, fake, node)
        if isinstance(fake, torch.SymInt):
            size = self.names.size(fake)
            if not isinstance(size, int) and size.is_Symbol:
                self.scalars.setdefault(size.name, node)
            return size
        return fake

    def _attribute(self, node: fx.Node) -> Any:
        held = operator.attrgetter(str(node.target))(self.root)
        if not isinstance(held, torch.Tensor):
            return held
        self.constants.add(node.name)
        fake = node.meta.get("val")
        return self._define(node.name, fake if isinstance(fake, torch.Tensor) else held, node)

    def _define(self, name: str, fake: torch.Tensor, node: fx.Node) -> TracedTensor:
        if fake.layout is not torch.strided:
            raise CaptureError(f"value {name} has layout {fake.layout}; only strided tensors can be planned")
        self.specs[name] = self._spec(fake)
        self.nodes[name] = node
        return TracedTensor(name, fake)

    def _spec(self, fake: torch.Tensor) -> TensorSpec:
        shape = tuple(self.names.size(extent) for extent in fake.shape)
        return TensorSpec(shape, dtype_name(fake.dtype), tuple(self.names.size(stride) for stride in fake.stride()))

    def _call(self, node: fx.Node) -> Any:
        target, fake = node.target, node.meta.get("val")
        if target is operator.getitem:
            container, index = self._resolve(node.args[0]), node.args[1]
            return container[index]
        if isinstance(fake, torch.SymInt | torch.SymFloat | torch.SymBool):
            number = self.names.expression(fake)
            if isinstance(number, sympy.Symbol):
                self.scalars.setdefault(number.name, node)
            return number
        if target in MODE_SWITCHES:
            if target is torch.amp.autocast_mode._enter_autocast and (len(node.args) < 3 or node.args[2]):
                raise CaptureError("the model enables autocast; cast it with model.to(dtype) instead")
            return None
        if isinstance(target, torch._ops.OpOverload):
            return self._op(node, target)
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._higher_order(node, target)
        if isinstance(fake, int | float | bool):
            return fake
        raise CaptureError(f"node {node.name} calls {target}, which is no ATen op")

    def _resolve(self, argument: Any) -> Any:
        """The argument with every fx node replaced by what it stands for."""
        return fx.map_arg(argument, self.values.__getitem__)

    def _op(self, node: fx.Node, target: torch._ops.OpOverload) -> Any:
        name = str(target)
        if op_of(name).family == "check":
            return None
        if name.startswith("aten.set_."):
            raise CaptureError("a tensor is given other memory (x.data = y, or x.set_(y)); use x.copy_(y) or x = y")
        bound = bind_arguments(name, self._resolve(node.args), self._resolve(node.kwargs), self.names)
        results, value = self._results(node)
        if any(one.fake.is_neg() for one in (*bound.operands, *results)):  # memory holds numbers of the other sign
            self._append_opaque(node, f"negated.{name}", bound.operands, results, bound.written)
            return value
        if not results:
            return self._append_opaque(node, name, bound.operands, (), bound.written)
        twin = functional_twin(target) if len(results) == len(bound.written) == 1 else None
        if twin is not None and self._may_be_functional(node, twin, bound.written[0]):
            self._append_functional(str(twin), bound, results, node)
            return value
        if len(results) == 1 and bound.operands and not bound.written and self._is_same(bound.operands[0], results[0]):
            # A split into a single part lists it.
            return bound.operands[0] if isinstance(value, TracedTensor) else bound.operands[:1]
        # Attention draws random numbers only with dropout.
        draws = torch.Tag.nondeterministic_seeded in target.tags and bound.attrs.get("dropout_p", 1.0) != 0.0
        self._append(name, bound, results, node, GENERATOR if draws else frozenset())
        return value

    def _may_be_functional(self, node: fx.Node, twin: torch._ops.OpOverload, written: TracedTensor) -> bool:
        """Whether nobody can tell that an in-place call wrote to an intermediate: nothing in its memory is read later.
        """
        storage = self.storages.of(written)
        sharing = [(one, tensor.name) for one, value in self.values.items() for tensor in tensors_in(value)
                   if self.storages.of(tensor) == storage]
        if not op_of(str(twin)).is_fusible or any(
            name in self.placeholders or name in self.constants
            or any(user is not node and user not in self.values for user in (*one.users, *self.nodes[name].users))
            for one, name in sharing
        ):
            return False
        return is_laid_out_alike(node, twin)

    def _append_functional(self, name: str, bound: Bound, results: list[TracedTensor], node: fx.Node) -> None:
        """Add an in-place call as the op ``name``, whose result is in memory of its own."""
        (written,) = bound.written
        storage = self.storages.of(written)
        readers = [op for op in self.ops if storage in self.accesses[op.name].touched]
        self._append(name, replace(bound, written=()), results, node, fresh=True)
        made = self.ops[-1]
        # Where the op stays as it is, it writes over what they read.
        self.ordered.extend((reader, made.name) for reader in unordered_readers(readers, made, self.ops))
        self.storages.renew(written)

    def _is_same(self, operand: TracedTensor, result: TracedTensor) -> bool:
        """True when an op handed back its operand: same memory, same layout, same bits."""
        if self.storages.of(operand) != self.storages.of(result) or operand.fake.dtype.is_complex:
            return False
        offsets = [self.names.size(tensor.fake.storage_offset()) for tensor in (operand, result)]
        return offsets[0] == offsets[1] and self._spec(operand.fake) == self._spec(result.fake)

    def _append(
        self, name: str, bound: Bound, results: list[TracedTensor], node: fx.Node,
        also_written: frozenset[int] = frozenset(), fresh: bool = False,
    ) -> None:
        for result in results:
            self._define(result.name, result.fake, node)
        source, result = next(iter(bound.operands), None), results[0]
        moves = source is not None and source.fake.device != result.fake.device
        names = tuple(operand.name for operand in bound.operands)
        spec = self.specs[source.name] if source is not None else None
        op, inputs, attrs = respell(name, names, bound.attrs, spec, self.specs[result.name], moves)
        # On another device than most; what an op makes of numbers alone can be made anywhere.
        elsewhere = {one.name for one in (*bound.operands, *results) if one.fake.device.type != self.device}
        if moves or not elsewhere <= self.from_nothing:
            attrs["device"] = result.fake.device.type
        if not bound.operands:
            self.from_nothing.update(item.name for item in results)
        touched = frozenset(map(self.storages.of, bound.operands))
        written = frozenset(map(self.storages.of, bound.written))
        is_view = bool(touched) and not written and not fresh and touched.issuperset(map(self.storages.of, results))
        self.ops.append(OpNode(op, inputs, tuple(item.name for item in results), attrs))
        self.accesses[result.name] = Access(frozenset() if is_view else touched, written | also_written)

    def _results(self, node: fx.Node) -> tuple[list[TracedTensor], Any]:
        """The tensors an op returns, and the same in the structure that ``getitem`` nodes index."""
        fake = node.meta.get("val")
        value = self._named(fake, f"{node.name}_out" if isinstance(fake, list | tuple) else node.name)
        return tensors_in(value), value

    def _named(self, fake: Any, name: str) -> Any:
        """A result: a tensor by its name, or several by that and their numbers, some in lists of their own."""
        if isinstance(fake, torch.Tensor):
            return TracedTensor(name, fake)
        if not isinstance(fake, list | tuple):
            return self.names.plain(fake)
        return tuple(self._named(item, f"{name}{number}{'_' * isinstance(item, list | tuple)}")
                     for number, item in enumerate(fake))

    def _append_opaque(
        self, node: fx.Node, name: str, operands: Sequence[TracedTensor], results: Sequence[TracedTensor],
        written: Sequence[TracedTensor],
    ) -> None:
        """An op that is kept whole. Without a tensor as its result it is there for something else that it does."""
        for result in results:
            self._define(result.name, result.fake, node)
        if not results:
            self.specs[node.name] = TensorSpec.contiguous((0,), "float32")
            self.nodes[node.name] = node
        outputs = tuple(one.name for one in results) or (node.name,)
        self.ops.append(OpNode(name, tuple(one.name for one in operands), outputs))
        touched, changed = (frozenset(map(self.storages.of, tensors)) for tensors in (operands, written))
        # What nobody can see written keeps its place all the same, as if it drew random numbers.
        self.accesses[outputs[0]] = Access(touched, changed if results or written else touched | GENERATOR)

    def _higher_order(self, node: fx.Node, target: torch._ops.HigherOrderOperator) -> Any:
        """Keep a call such as ``cond`` whole, as one opaque op (the tracer has inlined the simple ones)."""
        operands = tensors_in(self._resolve((node.args, node.kwargs)))
        results, value = self._results(node)
        # What it does inside is not looked at: it may write to anything it is given.
        self._append_opaque(node, f"higher_order.{target.name()}", operands, results, operands if results else ())
        return value

    def finish(self) -> Traced:
        ops = live(self.ops, self.accesses, self.outputs)
        used = {*(name for op in ops for name in op.inputs), *self.outputs}
        given = {*self.placeholders, *(self.constants & used)}
        kept = given.union(name for op in ops for name in op.outputs)
        names = {op.name for op in ops}
        graph = DataflowGraph(
            ops,
            {name: spec for name, spec in self.specs.items() if name in kept},
            [name for name in self.specs if name in given],
            self.outputs,
            self.names.hints,
            [*order_edges(ops, self.accesses), *(pair for pair in self.ordered if names.issuperset(pair))],
            self.names.derived,
            {op.name: tuple(self.nodes[op.name].meta.get("modules", ())) for op in ops},
        )
        graph.rounds = Roundings(graph).seen()
        nodes = {name: node for name, node in self.nodes.items() if name in kept}
        storages = {storage for access in self.accesses.values() for storage in access.written}
        written = frozenset(
            position for name, position in self.placeholders.items()
            if self.storages.of(TracedTensor(name, self.nodes[name].meta["val"])) in storages
        )
        return Traced(self.root, graph, nodes, self.placeholders, self.scalars, written)
