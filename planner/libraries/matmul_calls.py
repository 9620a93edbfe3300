"""What PyTorch offers for a matmul besides the op itself: libraries by name, and other ops that give the same numbers.

* ``matmul.cublas`` and ``matmul.cublaslt`` run the same op with the other of NVIDIA's two libraries.
* ``matmul.onednn`` is oneDNN's linear op, on CPUs in float32; half as wide types PyTorch gives to oneDNN itself.
* ``matmul.addmm`` adds a linear's bias before the product is rounded.
* ``matmul.unbatched`` is one product for a batch that reads one matrix. PyTorch reads it for every part of the batch.
* ``matmul.gemv`` is a matrix times a vector.
* ``matmul.padded`` pads a linear's weight to sizes that a GPU's tensor cores can take; vocabularies of 50257 are none.
* ``merged.one`` and ``merged.apart`` run linear ops that read one value (:mod:`~fuseplan.planner.graph.merged_linear`)
  as one product or as several, which may be faster for many rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from fuseplan.costmodel.devices import is_cpu, is_gpu
from fuseplan.costmodel.work import Work
from fuseplan.planner.errors import RefusedError
from fuseplan.planner.graph.dataflow import TensorSpec
from fuseplan.planner.graph.execute import bind_call, resolve_op
from fuseplan.planner.graph.layouts import laid_out
from fuseplan.planner.graph.merged_linear import MergedLinear, linear_apart
from fuseplan.planner.libraries.library_call import Call, LibraryCall, OpGroup
from fuseplan.planner.ops.table import op_of
from fuseplan.planner.rewrites.packing import pack_operands

LINEAR = "aten.linear.default"
#: Types that every form computes in.
_TYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Matmul:
    """A static ``[..., rows, k]`` times ``[..., k, n]``, or a linear's ``[n, k]``; ``at``: left, right, bias in the
    inputs.
    """

    op: str
    left: TensorSpec
    right: TensorSpec
    at: tuple[int, int, int | None]
    device_type: str


#: Computes the result from left, right and bias, perhaps in another shape.
_Compute: TypeAlias = Callable[[Any, Any, Any], torch.Tensor]


@dataclass(frozen=True)
class MatmulCall(LibraryCall):
    """A matmul in one of PyTorch's forms, which raises RefusedError where it cannot compute one."""

    name: str
    form: Callable[[Matmul], _Compute]
    #: Whether its rows may be longer in memory than they look.
    pads: bool = False
    by_rule: bool = False

    def overhead(self, group: OpGroup) -> Work:
        return _padding(group) if self.pads else Work()

    def plan(self, group: OpGroup) -> Callable[[], Call]:
        found = read_matmul(group)
        compute = self.form(found)
        (left, right, bias), result = found.at, group.specs[group.outputs[0]]
        shape, strides = result.shape, result.strides

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            result = compute(inputs[left], inputs[right], None if bias is None else inputs[bias])
            if self.pads and group.only_returned:
                return result.view(shape)
            return result if result.stride() == strides and result.shape == shape else laid_out(
                result.reshape(shape), shape, strides)

        return lambda: run


def read_matmul(group: OpGroup) -> Matmul:
    """The matmul that a group is; RefusedError where it is none that a library could run."""
    node = group.node
    if op_of(node.op).family != "matmul":
        raise RefusedError("it is no matmul")
    given = [group.specs[name] for name in node.inputs]
    if any(spec.numel == 0 for spec in given):
        raise RefusedError("a tensor is empty")
    if len({spec.dtype for spec in given}) != 1 or given[0].dtype not in _TYPES:
        raise RefusedError("its operands are not all of one of " + ", ".join(_TYPES))
    if (node.attrs.get("beta", 1), node.attrs.get("alpha", 1)) != (1, 1):
        raise RefusedError("it scales what it adds")
    names = (*node.inputs[1:], node.inputs[0]) if _adds_first(node.op) else node.inputs
    left, right, *bias = (group.specs[name] for name in names)
    if bias and len(bias[0].shape) != 1:
        raise RefusedError("its bias is not one row")
    if len(left.shape) < 2 or len(right.shape) not in (2, 3):
        raise RefusedError("an operand is a vector, or has too many dimensions")
    first, second, *third = (group.inputs.index(name) for name in names)
    return Matmul(node.op, left, right, (first, second, third[0] if third else None), group.device_type)


def _adds_first(op: str) -> bool:
    """Whether what is added to the product is the first operand."""
    return op_of(op).factors == (1, 2)


def is_contiguous(spec: TensorSpec) -> bool:
    return spec.strides == TensorSpec.contiguous(spec.shape, spec.dtype).strides


# -- forms ------------------------------------------------------------------------------------------------

#: Held while the process's preference is not what it was.
_PREFERENCE = threading.Lock()


def _preferred(library: str, found: Matmul) -> _Compute:
    """The op itself, with one of NVIDIA's libraries.

    PyTorch keeps its preference for all threads, so it is set just around the call, under a lock. A matmul that another
    thread launches meanwhile may get this library too: its result is as right.
    """
    if not is_gpu(found.device_type):
        raise RefusedError("it runs on CUDA devices only")
    prefer, preferred = torch._C._set_blas_preferred_backend, torch._C._get_blas_preferred_backend
    kinds = torch._C._BlasBackend
    kind = getattr(kinds, library)
    with _PREFERENCE:
        now = preferred()
    if kind == (kinds.Cublas if now == kinds.Default else now):
        raise RefusedError("PyTorch calls it anyway")
    op, bias_first = resolve_op(found.op), _adds_first(found.op)

    def compute(left: Any, right: Any, bias: Any) -> Any:
        args = (left, right) if bias is None else (bias, left, right) if bias_first else (left, right, bias)
        with _PREFERENCE:
            before = preferred()
            prefer(kind)
            try:
                return op(*args)
            finally:
                prefer(before)

    return compute


def _addmm(found: Matmul) -> _Compute:
    shape = found.left.shape
    if found.op != LINEAR or found.at[2] is None:
        raise RefusedError("it is no linear op with a bias")
    if len(shape) == 2 or (len(shape) == 3 and is_contiguous(found.left)):
        raise RefusedError("PyTorch calls it anyway")
    return lambda left, right, bias: torch.addmm(bias, left.reshape(-1, left.shape[-1]), right.t())


def _onednn(found: Matmul) -> _Compute:
    """oneDNN's inner product, as TorchInductor calls it, on a weight that is not packed."""
    if found.op != LINEAR or not is_cpu(found.device_type):
        raise RefusedError("it runs linear ops on CPUs only")
    if found.left.dtype != "float32":
        raise RefusedError("PyTorch calls it anyway")
    if not torch.backends.mkldnn.is_available():
        raise RefusedError("PyTorch was built without oneDNN")
    if not is_contiguous(found.right):
        raise RefusedError("the weight is not contiguous")
    op = torch.ops.mkldnn._linear_pointwise.default
    return lambda left, right, bias: op(left, right, bias, "none", [], "")


def _unbatched(found: Matmul) -> _Compute:
    left, right = found.left, found.right
    if len(left.shape) != 3 or len(right.shape) != 3:
        raise RefusedError("there is no batch")
    if right.shape[0] != 1 and (right.strides[0] != 0 or right.shape[0] != left.shape[0]):
        raise RefusedError("every matrix has its own right operand, or the left one is broadcast")
    return lambda left, right, _: torch.mm(left.reshape(-1, left.shape[-1]), right[0])


def _gemv(found: Matmul) -> _Compute:
    if math.prod(found.left.shape[:-1]) != 1 or len(found.right.shape) != 2:
        raise RefusedError("it has several rows, or a batch")
    transposed = found.op != LINEAR

    def compute(left: Any, right: Any, bias: Any) -> Any:
        matrix, vector = right.t() if transposed else right, left.reshape(-1)
        return torch.mv(matrix, vector) if bias is None else torch.addmv(bias, matrix, vector)

    return compute


#: Elements of 16 bits to which matrices for tensor cores are aligned, to which sizes are padded, and rows from which on
#: a matmul is limited by arithmetic rather than by its weights.
_ALIGNED, _PADDED_TO, _MANY_ROWS = 8, 64, 64


def _unaligned(found: Matmul) -> tuple[int, int]:
    """By how much a linear's weight is to grow in its rows and columns; RefusedError where padding has no use."""
    if not is_gpu(found.device_type) or found.op != LINEAR or found.left.dtype not in ("float16", "bfloat16"):
        raise RefusedError("it pads linear ops of 16 bits on CUDA devices only")
    n, k = found.right.shape
    if n % _ALIGNED == 0 and k % _ALIGNED == 0:
        raise RefusedError("its sizes are aligned")
    if math.prod(found.left.shape[:-1]) < _MANY_ROWS:
        raise RefusedError("it has few rows, and takes as long as reading its weight")
    return -n % _PADDED_TO, -k % _ALIGNED


def alignment(group: OpGroup) -> int:
    """The largest power of two, up to what tensor cores want, that divides a linear's two sizes."""
    return math.gcd(_ALIGNED, *read_matmul(group).right.shape)


def _padding(group: OpGroup) -> Work:
    """What padding copies: the weight, rows that are padded too, and a result that others than the caller read."""
    found = read_matmul(group)
    rows, columns = _unaligned(found)
    read = [found.right, *([found.left] if columns else ()), *([group.specs[group.outputs[0]]] if (
        rows and not group.only_returned) else ())]
    return Work(l2_bytes=sum(2 * one.nbytes() for one in read), launches=len(read))


def _padded(found: Matmul) -> _Compute:
    rows, columns = _unaligned(found)
    n = found.right.shape[0]

    def compute(left: Any, right: Any, bias: Any) -> Any:
        wide = F.pad(left, (0, columns)) if columns else left
        bias = None if bias is None else F.pad(bias, (0, rows))
        return F.linear(wide, F.pad(right, (0, columns, 0, rows)), bias)[..., :n]

    return compute


PADDED = MatmulCall("matmul.padded", _padded, pads=True, by_rule=True)
MATMUL_CALLS = (
    MatmulCall("matmul.cublas", partial(_preferred, "Cublas")),
    MatmulCall("matmul.cublaslt", partial(_preferred, "Cublaslt")),
    MatmulCall("matmul.addmm", _addmm),
    MatmulCall("matmul.onednn", _onednn),
    MatmulCall("matmul.unbatched", _unbatched),
    MatmulCall("matmul.gemv", _gemv),
    PADDED,
)


@dataclass(frozen=True)
class MergedCall(LibraryCall):
    """A merged linear op, one product if ``joined``."""

    name: str
    joined: bool

    def plan(self, group: OpGroup) -> Callable[[], Call]:
        if group.node.op != "fuseplan.merged_linear.default":
            raise RefusedError("it is no merged linear op")
        call = MergedLinear(pack_operands) if self.joined else linear_apart
        (x, weights, biases), _ = bind_call(group.node, [group.inputs.index(name) for name in group.node.inputs])
        return lambda: lambda *inputs: call(inputs[x], [inputs[at] for at in weights], [inputs[at] for at in biases])


MERGED_CALLS = (MergedCall("merged.one", True), MergedCall("merged.apart", False))
