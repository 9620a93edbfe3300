"""One fusion group as the search sees it: inputs to run it on, the unfused chain, a float64 oracle, the kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.gathers import computes_indices, index_limits
from fuseplan.kernels.ir.index import number, symbols_of
from fuseplan.kernels.ir.ir import Buffer, KernelIR
from fuseplan.kernels.ir.ops import float_of_bits, torch_dtype
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.graph.execute import bind_call, resolve_op
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.implementations.direct_calls import Direct
from fuseplan.planner.implementations.sample_inputs import (
    choose_positions,
    opaque_positions,
    sample_inputs,
    start_bags,
)
from fuseplan.planner.libraries.library_call import Call, LibraryCall, OpGroup
from fuseplan.planner.lowering.lower import group_nodes, lower
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.work.group_work import hot_inputs, kernel_work, op_work

#: Bounds on integers that are tried one after another where random ones lead to indices that do not exist.
_SMALLER = (4, 2, 1)
#: Those that were found, by kernel, seed and device: to find one, the chain runs on a CPU with copies of its weights.
_small_enough: dict[tuple[KernelIR, int, str], int | None] = {}


@dataclass(frozen=True)
class TunableGroup:
    """A fusion group with concrete sizes (implements :class:`fuseplan.search.timing.subject.Subject`).

    Attributes:
        ir: The fused kernel, static; only its buffers where no kernel can be generated (a library's op).
        work: Bytes, flops and launches of the fused kernel.
        hot_inputs: Per input, True for an activation just produced, False for a weight.
        nodes: The ops of the unfused chain with the views between them, topological.
        inputs, outputs: Value names of the kernel's inputs and outputs; ``specs`` has their layouts.
        library: What runs the ops in ATen's place; None for ATen.
        packed: Numbers of the inputs that lie one after another in one buffer, which is one operand.
        only_returned: As of :class:`~fuseplan.planner.libraries.library_call.OpGroup`.
    """

    key: str
    label: str
    ir: KernelIR
    work: Work
    hot_inputs: tuple[bool, ...]
    nodes: tuple[OpNode, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    specs: Mapping[str, TensorSpec]
    device: str = "cpu"
    library: LibraryCall | None = None
    packed: tuple[int, ...] = ()
    only_returned: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of what a call is given: the inputs, with what is packed named once."""
        return tuple(name for number, name in enumerate(self.inputs) if number not in self.packed[1:])

    @cached_property
    def positions(self) -> Mapping[int, int]:
        below = opaque_positions(self.nodes, self.specs)
        return {**index_limits(self.ir),
                **{number: below[name] for number, name in enumerate(self.operands) if name in below}}

    def make_inputs(self, seed: int, device: str) -> list[torch.Tensor]:
        """Fresh random tensors (:func:`sample_inputs`), smaller until all that the chain looks up exists."""
        def made(most: int | None) -> list[torch.Tensor]:
            generator = torch.Generator(device).manual_seed(seed)
            found = sample_inputs(self.ir, self.nodes, self.operands, generator, most)
            named = dict(zip(self.operands, found, strict=True))
            start_bags(self.nodes, self.specs, named)
            choose_positions(opaque_positions(self.nodes, self.specs), named, generator)
            return found

        if not computes_indices(self.ir):
            return made(None)
        key = self.ir, seed, device
        if key in _small_enough:
            return made(_small_enough[key])
        for most in (None, *_SMALLER):
            inputs = made(most)
            if self._finds_all(inputs):
                break
        _small_enough[key] = most
        return inputs

    def _unpacked(self, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """A tensor for each input: rows of the packed operand where several lie in one."""
        if not self.packed:
            return operands
        rows = [int(self.specs[self.inputs[number]].shape[0]) for number in self.packed]
        first = self.packed[0]
        return [*operands[:first], *operands[first].split(rows), *operands[first + 1 :]]

    def _finds_all(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether every index exists: asked on the CPU, since a GPU that misses one answers nothing any more.

        Only what integers are made of is computed; where others are read or written, memory of their shape will do.
        """
        nodes, wanted = _integers_alone(self.nodes, self.specs)
        given = dict(zip(self.inputs, inputs, strict=True))
        made = tuple(value for node in nodes for value in node.outputs)
        names = [value for value in dict.fromkeys(v for node in nodes for v in node.inputs) if value not in made]
        operands = [
            given[name].cpu() if name in wanted else torch.empty_like(given[name], device="cpu") if name in given
            else _empty(self.specs[name], "cpu") for name in names
        ]
        try:
            chain_module(nodes, names, made, "cpu").forward(*operands)
        except (IndexError, RuntimeError) as error:
            return not (isinstance(error, IndexError) or "out of bounds" in str(error))
        return True

    def allocate_outputs(self, device: str) -> list[torch.Tensor]:
        return [_empty(self.specs[value], device) for value in self.outputs]

    @cached_property
    def chain(self) -> fx.GraphModule:
        """The unfused chain as PyTorch would run it."""
        return chain_module(self.nodes, self.inputs, self.outputs, self.device)

    @cached_property
    def _call(self) -> Call:
        assert self.library is not None
        specs = {name: self.specs[name] for name in (*self.inputs, *self.outputs)}
        return self.library.build(
            OpGroup(self.nodes[0], self.inputs, self.outputs, specs, self.device, self.only_returned))

    def eager(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The ATen ops one by one, or the library's call."""
        given = self._unpacked(inputs)
        if self.library is not None:
            result = self._call(*given)
            return [result] if isinstance(result, torch.Tensor) else list(result)
        # forward, not __call__: in a model the ops are lines of one function and pay for no module call.
        return list(self.chain.forward(*given))

    def reference(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The chain with every float in float64, on the inputs' device; outputs stay float64."""
        return reference_results(self.nodes, self.inputs, self.outputs, self._unpacked(inputs), self.device)

    def __getstate__(self) -> dict[str, object]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


def _empty(spec: TensorSpec, device: str) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=torch_dtype(spec.dtype), device=device)


def _integers_alone(nodes: Sequence[OpNode], specs: Mapping[str, TensorSpec]) -> tuple[list[OpNode], set[str]]:
    """The ops of a chain that read integers or that these are made by, and the values that it takes to compute them."""
    kept: list[OpNode] = []
    wanted: set[str] = set()
    for node in reversed(nodes):
        integers = {value for value in node.inputs if specs[value].dtype.startswith(("int", "uint"))}
        makes = not wanted.isdisjoint(node.outputs)
        if integers or makes:
            kept.append(node)
            wanted |= set(node.inputs) if makes else integers
    return kept[::-1], wanted


def _widened(node: OpNode) -> OpNode:
    """The op with every float dtype it names replaced by float64: no rounding between ops."""
    attrs = {
        name: "float64" if name == "dtype" and value in ("float32", "bfloat16", "float16") else value
        for name, value in node.attrs.items()
    }
    if node.op == "aten.to.dtype_layout":
        attrs.pop("layout", None)
    return replace(node, attrs=attrs)


def reference_results(
    nodes: Iterable[OpNode], names: Sequence[str], outputs: Sequence[str], inputs: Sequence[torch.Tensor], device: str
) -> list[torch.Tensor]:
    """A chain's outputs with every float in float64, where its ``inputs``, named ``names``, are; else on ``device``."""
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    where = inputs[0].device.type if inputs else device
    return list(chain_module([_widened(node) for node in nodes], names, outputs, where)(*wide))


def chain_module(
    nodes: Iterable[OpNode], inputs: Sequence[str], outputs: Sequence[str], device: str | None = None,
    symbols: Sequence[str] = (), source: DataflowGraph | None = None, as_kernel: bool = False,
) -> fx.GraphModule:
    """A module that runs ``nodes`` one ATen call at a time: ``module(*inputs, *sizes) -> tuple of outputs``.

    ``inputs`` and ``outputs`` are names of values, ``symbols`` of dynamic sizes of the graph ``source``. Ops without
    operands create their result on ``device``. With ``as_kernel`` a single output is no tuple. A node of the graph that
    computes one value has its name as ``meta["value"]``.
    """
    graph = fx.Graph()
    values: dict[str, fx.Node] = {name: graph.placeholder(f"arg{number}") for number, name in enumerate(inputs)}
    sizes = {name: graph.placeholder(f"size{number}") for number, name in enumerate(symbols)}
    for name, made in values.items():
        made.meta["value"] = name
    for node in nodes:
        sized = replace(node, attrs=_computed(node.attrs, graph, sizes, source))
        args, kwargs = bind_call(sized, [values[name] for name in node.inputs], device)
        call = graph.call_function(resolve_op(node.op), tuple(args), dict(kwargs))
        if len(node.outputs) == 1:
            values[node.outputs[0]] = call
            call.meta["value"] = node.outputs[0]
        else:
            values |= {name: graph.call_function(operator.getitem, (call, n)) for n, name in enumerate(node.outputs)}
    results = tuple(values[name] for name in outputs)
    graph.output(results[0] if as_kernel and len(results) == 1 else results)
    graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), graph)


def _computed(value: Any, graph: fx.Graph, sizes: Mapping[str, fx.Node], source: DataflowGraph | None) -> Any:
    """Attributes with nodes in place of what changes between calls."""
    if isinstance(value, Mapping):
        return {name: _computed(item, graph, sizes, source) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_computed(item, graph, sizes, source) for item in value]
    if not isinstance(value, sympy.Expr):
        return value
    derived, hints = ({}, {}) if source is None else (source.derived, source.symbols)
    value = value.xreplace(
        {free: derived[free.name] for free in value.free_symbols if free.name not in sizes and free.name in derived}
    )
    names = sorted(symbols_of(value))

    @lru_cache(maxsize=256)
    def compute(*given: int) -> int | float:
        values = zip(names, given, strict=True)
        decoded = {name: float_of_bits(one) if isinstance(hints.get(name), float) else one for name, one in values}
        return number(value, decoded)

    return graph.call_function(Direct(compute, "number_of"), tuple(sizes[name] for name in names))


def group_subject(
    graph: DataflowGraph, ops: Sequence[str], key: str, numerics: str = "fp32", device: str = "cpu",
    outputs: Sequence[str] | None = None,
) -> TunableGroup:
    """The subject for a group of a static graph, with ``outputs`` in this order; NotLowerable where it is no kernel."""
    lowered = lower_group(graph, ops, numerics) if outputs is None else lower(graph, ops, numerics, outputs)
    nodes = group_nodes(graph, lowered)
    values = {*lowered.inputs, *(value for node in nodes for value in (*node.inputs, *node.outputs))}
    hot = hot_inputs(graph, lowered.inputs)
    return TunableGroup(
        key=key,
        label=group_label(graph, ops, lowered.outputs),
        ir=lowered.ir,
        work=kernel_work(lowered.ir, hot, device),
        hot_inputs=hot,
        nodes=nodes,
        inputs=lowered.inputs,
        outputs=lowered.outputs,
        specs={value: graph.specs[value] for value in values},
        device=device,
    )


def op_group(graph: DataflowGraph, ops: Sequence[str], outputs: Sequence[str], device_type: str) -> OpGroup:
    """A single op of a static graph as library calls see it; the views that it reads through stay outside."""
    (node,) = map(graph.op, ops)
    specs = {value: _plain_ones(graph.specs[value]) for value in (*node.inputs, *node.outputs)}
    # Views count as readers: they need rows that follow each other.
    is_read = any(graph.graph.edges[node.name, reader]["values"] for reader in graph.graph.successors(node.name))
    only_returned = not is_read and all(value in graph.outputs for value in outputs)
    return OpGroup(node, tuple(dict.fromkeys(node.inputs)), tuple(outputs), specs, device_type, only_returned)


def _plain_ones(spec: TensorSpec) -> TensorSpec:
    """The same layout with the strides of single elements as in a dense tensor: past all that lies in later dimensions.

    They address nothing, but ATen's matmul copies its weight for every batch where they are odd, its convolution takes
    one picture for channels first, and what a trace says of them is not what a device makes.
    """
    strides = list(spec.strides)
    for dim in reversed(range(len(strides))):
        if spec.shape[dim] == 1:
            later = [size * stride for size, stride in zip(spec.shape[dim + 1 :], strides[dim + 1 :], strict=True)]
            strides[dim] = max([1, *later]) if spec.is_static else later[0] if later else 1
    return TensorSpec(spec.shape, spec.dtype, tuple(strides))


def op_subject(graph: DataflowGraph, group: OpGroup, key: str) -> TunableGroup:
    """The subject for a group that only library calls run."""
    is_merged = group.node.op.startswith("fuseplan.merged_linear")
    packed = tuple(weight.position for weight in group.node.attrs["weights"]) if is_merged else ()
    operands = [name for number, name in enumerate(group.inputs) if number not in packed[1:]]
    layouts = dict(group.specs)
    if packed:
        first = layouts[group.inputs[packed[0]]]
        rows = sum(int(group.specs[group.inputs[number]].shape[0]) for number in packed)
        layouts[group.inputs[packed[0]]] = TensorSpec.contiguous((rows, *first.shape[1:]), first.dtype)
    return TunableGroup(
        key=key,
        label=group_label(graph, (group.node.name,), group.outputs),
        ir=without_body(layouts, operands, group.outputs),
        work=op_work(graph, group.node.name),
        hot_inputs=hot_inputs(graph, operands),
        nodes=(group.node,),
        inputs=group.inputs,
        outputs=group.outputs,
        specs=group.specs,
        device=group.device_type,
        packed=packed,
        only_returned=group.only_returned,
    )


def without_body(specs: Mapping[str, TensorSpec], inputs: Iterable[str], outputs: Iterable[str]) -> KernelIR:
    """The buffers of what no kernel is generated for, as a kernel's description."""
    named = [*((name, False) for name in inputs), *((name, True) for name in outputs)]
    return KernelIR(tuple(
        Buffer(name, specs[name].dtype, specs[name].shape, specs[name].strides, is_output) for name, is_output in named
    ), ())


#: Spellings of long op runs by what they compute; only names for people, never used to decide anything.
_SHORT = {"to": "", "_to_copy": "", "clone": "copy", "reshape": "copy", "contiguous": "copy"}


def group_label(graph: DataflowGraph, ops: Sequence[str], values: Iterable[str]) -> str:
    """For people: the op names in order without repeats, the largest output's shape, the dtype."""
    names: list[str] = []
    for name in ops:
        node = graph.op(name)
        if kind_of(node, graph.specs) == "view":
            continue
        short = node.op.split(".")[1]
        short = _SHORT.get(short, short)
        if short and short not in names:
            names.append(short)
    largest = max((graph.specs[value] for value in values), key=lambda spec: spec.nbytes())
    shape = "x".join(str(extent) for extent in largest.shape)
    text = "+".join(names) or "cast"
    return f"{text if len(text) <= 40 else text[:37] + '...'} {shape} {largest.dtype}"


#: ``fused(*inputs, *symbol values)``: a tensor, or a tuple of tensors where the group has several outputs.
Fused: TypeAlias = Callable[..., Any]
