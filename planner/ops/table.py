"""The table of ops, and questions that also an op's sizes, dtypes and attributes decide.

An op is a *view* (an address map), *compute* (a generated kernel can hold it), an *anchor* (a matmul, a convolution,
attention: there are several ways to run it), *foreign* (ATen or another compiler runs it) or *opaque* (random numbers,
collectives, most in-place updates: only ATen runs it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch

from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec
from fuseplan.planner.ops.activation import ACTIVATIONS
from fuseplan.planner.ops.anchors import ANCHORS
from fuseplan.planner.ops.gather_scatter import LOOKUPS, WRITES
from fuseplan.planner.ops.op import DTYPES, FLOATS, INTEGERS, Op, rows
from fuseplan.planner.ops.pointwise import POINTWISE
from fuseplan.planner.ops.positions import Specs, reshape_is_view
from fuseplan.planner.ops.rearrange import REARRANGEMENTS
from fuseplan.planner.ops.reduce import NORMALISATIONS, REDUCTIONS
from fuseplan.planner.ops.scan import SCANS
from fuseplan.planner.ops.views import VIEWS
from fuseplan.planner.ops.windows import POOLING

OpKind: TypeAlias = Literal["view", "compute", "anchor", "foreign", "opaque"]

#: By name. ``name.*`` are the overloads of ``name`` that have no row of their own.
OPS: Mapping[str, Op] = MappingProxyType({
    **POINTWISE, **ACTIVATIONS, **REARRANGEMENTS, **WRITES, **LOOKUPS, **REDUCTIONS, **NORMALISATIONS, **SCANS,
    **VIEWS, **POOLING, **ANCHORS,
    **rows("other", "feature_dropout alpha_dropout feature_alpha_dropout dropout_ feature_dropout_ alpha_dropout_ "
                    "feature_alpha_dropout_", drops=True),
    **rows("other", "empty_like rand_like randn_like", like=True),
    **rows("composed", "movedim.int movedim.intlist moveaxis.int moveaxis.intlist swapaxes swapdims "
                       "tensor_split.sections tensor_split.indices hsplit.int vsplit.int dsplit.int ravel tile "
                       "hstack vstack dstack column_stack row_stack fliplr flipud meshgrid meshgrid.indexing "
                       "broadcast_tensors take_along_dim "
                       "einsum tensordot outer inner kron cosine_similarity instance_norm l1_loss "
                       "isfinite isreal std std.dim selu prelu trapezoid.x trapezoid.dx "
                       "divide.Tensor divide.Scalar multiply.Tensor multiply.Scalar subtract.Tensor subtract.Scalar "
                       "negative absolute clip clip.Tensor greater.Tensor greater.Scalar less.Tensor less.Scalar "
                       "greater_equal.Tensor greater_equal.Scalar less_equal.Tensor less_equal.Scalar "
                       "not_equal.Tensor not_equal.Scalar special_expit special_log1p special_exp2 special_erf"),
    **rows("state", "detach_ requires_grad_"),
    **rows("check", "_assert_async.* _assert_scalar.* _assert_tensor_metadata.* sym_constrain_range.* "
                    "sym_constrain_range_for_size.*"),
})
_UNKNOWN = Op()


@lru_cache(maxsize=4096)
def op_of(name: str) -> Op:
    """What is known of an op; of one without a row, nothing."""
    return OPS.get(name) or OPS.get(f"{name.rpartition('.')[0]}.*", _UNKNOWN)


def mutates(node: OpNode) -> bool:
    """True when the op writes to one of its operands (ATen names end in ``_``, or it has an ``out``)."""
    name = node.op.split(".")[1] if node.op.count(".") >= 1 else node.op
    return (name.endswith("_") and not name.endswith("__")) or node.op.endswith(".out")


def written_value(node: OpNode) -> str | None:
    """The operand to which the op writes as a kernel can: its elements are stored, and not read. None for other ops."""
    return None if op_of(node.op).writes is None else node.inputs[0]


def written_dim(node: OpNode, specs: Specs) -> int | None:
    """The dimension of that operand along which another one says where to; None where all of it is written."""
    writes = op_of(node.op).writes
    return None if writes is None else writes(node, specs)


def is_address_map(node: OpNode, specs: Specs) -> bool:
    """True when the op moves no data: a view, or a ``reshape`` whose result strides can express."""
    op = op_of(node.op)
    if not op.may_copy:
        return op.view is not None
    return reshape_is_view(specs[node.inputs[0]], specs[node.outputs[0]])


def kind_of(node: OpNode, specs: Specs) -> OpKind:
    """What can run an op: nothing (``view``), a generated kernel (``compute``), a library (``anchor``), or others."""
    if is_address_map(node, specs):
        return "view"
    if _is_anchor(node, specs):
        return "anchor"
    if why_opaque(node, specs) is None:
        return "compute"
    return "foreign" if _is_foreign(node, specs) else "opaque"


def _is_anchor(node: OpNode, specs: Specs) -> bool:
    """Whether libraries run the op on one device, without random numbers; no convolution that a kernel can hold."""
    op = op_of(node.op)
    if not op.is_anchor or "device" in node.attrs or node.attrs.get("dropout_p"):
        return False
    if op.is_fusible and why_opaque(node, specs) is None:
        return False
    if op.family == "order":
        return all(specs[value].dtype in DTYPES for value in (*node.inputs, *node.outputs))
    return all(specs[value].dtype in FLOATS for value in node.outputs)


def _is_foreign(node: OpNode, specs: Specs) -> bool:
    """Whether an op that no kernel of ours can hold is a function of floats: another compiler may have code for it.

    No such op reads integers: which are valid only the op knows. Nor does it return integers beside floats (``topk``):
    what looks elements up by them needs those very ones.
    """
    if not node.op.startswith("aten.") or "device" in node.attrs or not node.inputs or not is_function(node.op):
        return False
    if any(node.attrs.get(name) for name in ("training", "train", "use_input_stats", "dropout_p")):
        return False
    read = all(specs[value].dtype in (*FLOATS, "bool") for value in node.inputs)
    made = [specs[value].dtype for value in node.outputs]
    return read and all(one in DTYPES for one in made) and (len(made) == 1 or all(one in FLOATS for one in made))


@lru_cache(maxsize=4096)
def is_function(name: str) -> bool:
    """Whether the ATen op of this name makes new tensors of a known shape from its operands alone."""
    packet, _, overload = name.removeprefix("aten.").partition(".")
    op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        return False
    hidden = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return hidden.isdisjoint(op.tags) and all(
        isinstance(one.type, torch.TensorType) and one.alias_info is None for one in op._schema.returns)


def chosen_integers(node: OpNode, specs: Specs) -> tuple[str, ...]:
    """The integers that an opaque op reads, but for the positions at which it scatters: 0 is the one safe choice."""
    read = node.inputs[:1] + node.inputs[2:] if op_of(node.op).family == "scatter" else node.inputs
    return tuple(value for value in read if specs[value].dtype in INTEGERS)


def can_stand_alone(node: OpNode, specs: Specs) -> bool:
    """Whether ATen can run an opaque op by itself on numbers of our choice: integers that it reads may be positions."""
    values = (*node.inputs, *node.outputs)
    return (
        node.op.startswith("aten.") and bool(node.outputs) and is_function(node.op) and "device" not in node.attrs
        and all(specs[value].dtype in DTYPES for value in values) and not node.attrs.get("dropout_p"))


def why_opaque(node: OpNode, specs: Specs) -> str | None:
    """Why no generated kernel can absorb the op, None when one can."""
    if not op_of(node.op).is_fusible:
        return f"{node.op} has no recipe: it stays a library call"
    if node.inputs and "device" in node.attrs:
        return f"{node.op}: moves data between devices, or reads a tensor of another one than most of the graph"
    for value in (*node.inputs, *node.outputs):
        if specs[value].dtype not in DTYPES:
            return f"{node.op}: dtype {specs[value].dtype} is not handled"
    return why_refused(node, specs)


#: Elements that lie side by side where the dimensions that an op reduces are several runs of memory, at least.
_LEAST_RUN = 64
#: Elements of a tensor that is folded as a whole by one thread: PyTorch shares no fewer among several
#: (``at::internal::GRAIN_SIZE``), and a GPU's block holds half as many in registers.
_MOST_ALONE = 32768
#: Arguments that may be numbers in the place of elements.
_NUMBERS = ("self", "other", "value", "fill_value", "s", "alpha", "min", "max", "min_val", "max_val")


def _unheld_number(node: OpNode, specs: Specs) -> str | None:
    """Refuses a number that the op's integer type cannot hold: ATen raises, or wraps it around."""
    dtype = specs[node.outputs[0]].dtype
    compares = dtype == "bool" and bool(node.inputs)  # with a float it compares floats
    if compares:
        dtype = specs[node.inputs[0]].dtype
    if dtype not in INTEGERS:
        return None
    limits = torch.iinfo(torch_dtype(dtype))
    numbers = [one for name in _NUMBERS if isinstance(one := node.attrs.get(name), int if compares else int | float)]
    unheld = [one for one in numbers if not limits.min <= one <= limits.max]
    return f"{unheld[0]} is no number of dtype {dtype}" if unheld else None


def why_refused(node: OpNode, specs: Specs) -> str | None:
    """Why no kernel can compute the op at these sizes and attributes, None when one can."""
    op = op_of(node.op)
    if not op.is_fusible:
        return f"{node.op} has no recipe: it stays a library call"
    dims: tuple[int, ...] = ()
    if op.reduced_dim is not None:
        rank = len(specs[node.inputs[0]].shape)
        dims = op.reduced_dim(node, specs)
        if not rank:
            return f"{node.op}: reduces a scalar"
        if not set(dims) <= set(range(rank)) or len(set(dims)) < len(dims):
            return f"{node.op}: reduces dimensions {dims} of {rank}"
        # A softmax of one row has one block in ATen, too.
        if len(dims) == rank and (rank > 1 or op.effort in ("fold", "position")) and not (
                _is_short(specs[node.inputs[0]]) or _is_shared(op, node, specs)):
            return f"{node.op}: one thread, or one block of a GPU's, would reduce all of {rank} dimensions by itself"
    reason = _unheld_number(node, specs) or (op.refuse(node, specs) if op.refuse is not None else None)
    if reason is not None:
        return f"{node.op}: {reason}"
    # Of dynamic sizes that cannot always be told. A plan is made for some sizes, with which it is.
    if len(dims) > 1 and (spec := specs[node.inputs[0]]).is_static and (
            op.walk is None or op.walk(node, specs) is None):
        run = [(spec.shape[dim], spec.strides[dim]) for dim in sorted(dims) if spec.shape[dim] != 1]
        if _run_length(run) < _LEAST_RUN:
            return (f"{node.op}: the dimensions that it reduces are not one run of memory, nor several of "
                    f"{_LEAST_RUN} elements")
    return None


def _run_length(dims: Sequence[tuple[int, int]]) -> float:
    """Elements side by side in each run of memory that dimensions of such sizes and strides are; infinite if it is one.
    """
    length, step = dims[-1] if dims else (1, 1)
    for extent, stride in reversed(dims[:-1]):
        if stride != length * step:
            return length if step == 1 else 0
        length *= extent
    return math.inf


def _is_shared(op: Op, node: OpNode, specs: Specs) -> bool:
    """Whether several threads, or blocks of a GPU's, fold parts of a tensor: where there is one fold."""
    return op.effort == "fold" and specs[node.inputs[0]].is_static


def _is_short(spec: TensorSpec) -> bool:
    """Whether one thread, or one block of them, folds all of a tensor as fast as several that then meet."""
    return len(spec.shape) == 1 if not spec.is_static else spec.numel <= _MOST_ALONE
