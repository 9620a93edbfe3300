"""What PyTorch offers for a matmul besides the op itself: libraries by name, other shapes, and ops in its epilogue.

* ``matmul.cublas`` and ``matmul.cublaslt`` run the same op with the other of NVIDIA's two libraries.
* ``matmul.addmm`` adds a bias, or the residual that a next op adds, inside the matmul.
* ``matmul.addmm_activation`` runs an activation in cuBLASLt's epilogue. ``matmul.onednn`` does so on CPUs.
* ``matmul.batched``, ``matmul.unbatched`` and ``matmul.gemv`` ask for the same numbers in other shapes.

What an epilogue adds or activates has not been rounded to the matmul's type before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from fuseplan.planner.graph.dataflow import OpNode, TensorSpec
from fuseplan.planner.graph.execute import resolve_op
from fuseplan.planner.graph.layouts import laid_out
from fuseplan.planner.libraries.library_call import Call, OpGroup

__all__ = ["MATMUL_CALLS", "MatmulCall"]

_aten = torch.ops.aten
_LINEAR, _MM, _BMM, _ADDMM, _MATMUL = (
    f"aten.{name}.default" for name in ("linear", "mm", "bmm", "addmm", "matmul"))
_ADD, _RELU, _GELU, _SILU = "aten.add.Tensor", "aten.relu.default", "aten.gelu.default", "aten.silu.default"
_TYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class _Matmul:
    """A matmul, and the op that may follow it.

    Attributes:
        node: The matmul.
        left: Name and layout of ``[..., rows, k]``.
        right: Name and layout of ``[..., k, n]``; of a linear's weight ``[n, k]``.
        bias: What it adds itself, by name.
        is_linear: The right operand is a weight ``[n, k]``.
        after: The op that alone reads the product, if any.
        added: What that op adds to the product, by name.
        result: Layout of the result.
        device_type: Where it runs.
    """

    node: OpNode
    left: tuple[str, TensorSpec]
    right: tuple[str, TensorSpec]
    bias: tuple[str, TensorSpec] | None
    is_linear: bool
    after: OpNode | None
    added: tuple[str, TensorSpec] | None
    result: TensorSpec
    device_type: str

    @property
    def rows(self) -> int:
        shape = self.left[1].shape
        return int(self.left[1].numel) // int(shape[-1])


#: Computes the result from what :func:`_read` names: left, right, bias, added.
_Compute: TypeAlias = Callable[..., torch.Tensor]


class _Form(Protocol):
    """One way to compute a matmul: why it cannot, and how it does."""

    def refuse(self, found: _Matmul) -> str | None: ...

    def compute(self, found: _Matmul) -> _Compute: ...


@dataclass(frozen=True)
class MatmulCall:
    """A matmul in one of PyTorch's forms (implements
    :class:`~fuseplan.planner.libraries.library_call.LibraryCall`).

    Attributes:
        name: What records call it.
        device_types: Where it can run.
        takes: Names of the ops of a group that it may run, in order.
        form: How it computes.
    """

    name: str
    device_types: tuple[str, ...]
    takes: frozenset[tuple[str, ...]]
    form: _Form

    def refuse(self, group: OpGroup) -> str | None:
        if group.device_type not in self.device_types:
            return f"it runs on {' and '.join(self.device_types)} only"
        if tuple(node.op for node in group.nodes) not in self.takes:
            return "it runs no such ops"
        found = _read(group)
        return found if isinstance(found, str) else self.form.refuse(found)

    def prepare(self, group: OpGroup, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return operands

    def build(self, group: OpGroup) -> Call:
        """The call.

        Raises:
            ValueError: It refuses the group.
        """
        found = _read(group)
        if isinstance(found, str):
            raise ValueError(f"{self.name} cannot run {group.outputs}: {found}")
        compute = self.form.compute(found)
        operands = (found.left, found.right, found.bias, found.added)
        at = [None if one is None else group.inputs.index(one[0]) for one in operands]
        shape, strides = (tuple(int(size) for size in sizes) for sizes in (found.result.shape, found.result.strides))

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            result = compute(*[None if position is None else inputs[position] for position in at])
            return result if result.stride() == strides and result.shape == shape else laid_out(
                result.reshape(shape), shape, strides)

        return run


# -- reading a group --------------------------------------------------------------------------------------


def _read(group: OpGroup) -> _Matmul | str:
    """The matmul that a group is, or why it is none that a library could run."""
    if not all(group.specs[name].is_static for name in (*group.inputs, *group.outputs)):
        return "its sizes are not static"
    node, *others = group.nodes
    given = [(name, group.specs[name]) for name in node.inputs]
    if any(spec.numel == 0 for _, spec in given):
        return "a tensor is empty"
    if len({spec.dtype for _, spec in given}) != 1 or given[0][1].dtype not in _TYPES:
        return "its operands are not all of one of " + ", ".join(_TYPES)
    bias = None
    if node.op == _ADDMM:
        if (node.attrs.get("beta", 1), node.attrs.get("alpha", 1)) != (1, 1):
            return "it scales what it adds"
        bias, *given = given
    elif len(given) == 3:
        *given, bias = given
    left, right = given
    if bias is not None and len(bias[1].shape) != 1:
        return "its bias is not one row"
    if len(left[1].shape) < 2 or len(right[1].shape) not in (2, 3):
        return "an operand is a vector, or has too many dimensions"
    after = others[0] if others else None
    reason = _why_not_next(group, node, after) if after is not None else None
    if reason is not None:
        return reason
    summands = [name for name in after.inputs if name != node.name] if after is not None else []
    added = (summands[0], group.specs[summands[0]]) if summands else None
    return _Matmul(node, left, right, bias, node.op == _LINEAR, after, added, group.specs[group.outputs[0]],
                   group.device_type)


def _why_not_next(group: OpGroup, node: OpNode, after: OpNode) -> str | None:
    if group.outputs != after.outputs or list(after.inputs).count(node.name) != 1:
        return "the product is read elsewhere, too"
    if after.attrs.get("alpha", 1) != 1:
        return "what is added is scaled"
    if after.op == _ADD and len(after.inputs) != 2:
        return "what is added is a number"
    return None


def _columns(found: _Matmul) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes ``[k, n]`` of the right operand."""
    return torch.t if found.is_linear else _itself


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_contiguous(spec: TensorSpec) -> bool:
    return spec.strides == TensorSpec.contiguous(spec.shape, spec.dtype).strides


def _is_flat(found: _Matmul) -> str | None:
    return None if len(found.right[1].shape) == 2 else "its right operand has a batch"


# -- forms ------------------------------------------------------------------------------------------------

#: Held while the process's preference is not what it was.
_PREFERENCE = threading.Lock()


@dataclass(frozen=True)
class _Preferred:
    """The op itself, with one of NVIDIA's libraries.

    PyTorch keeps its preference for all threads. It is set just around the call, which only launches kernels, and put
    back. Calls of this kind wait for each other. A matmul that another thread launches meanwhile may get this library,
    too: its result is as right, its speed and its last bits may be the other's.
    """

    library: str

    def refuse(self, found: _Matmul) -> str | None:
        """Asks PyTorch what it prefers now: that would be the op itself."""
        kinds, now = torch._C._BlasBackend, torch._C._get_blas_preferred_backend()
        own = kinds.Cublas if now == kinds.Default else now
        return "PyTorch calls it anyway" if own == getattr(kinds, self.library) else None

    def compute(self, found: _Matmul) -> _Compute:
        kind = getattr(torch._C._BlasBackend, self.library)
        prefer, preferred = torch._C._set_blas_preferred_backend, torch._C._get_blas_preferred_backend
        op, bias_first = resolve_op(found.node.op), found.node.op == _ADDMM

        def compute(left: Any, right: Any, bias: Any, _: Any) -> Any:
            args = (left, right) if bias is None else (bias, left, right) if bias_first else (left, right, bias)
            with _PREFERENCE:
                before = preferred()
                prefer(kind)
                try:
                    return op(*args)
                finally:
                    prefer(before)

        return compute


class _Addmm:
    """Everything that is added goes into the matmul: a linear's bias, or what the next op adds to the product."""

    def refuse(self, found: _Matmul) -> str | None:
        if found.added is None:
            if found.bias is None:
                return "nothing is added"
            shape = found.left[1].shape
            flat = len(shape) == 2 or (len(shape) == 3 and _is_contiguous(found.left[1]))
            return "PyTorch calls it anyway" if flat else _is_flat(found)
        if found.bias is not None:
            return "it has a bias, too"
        shape, dtype = found.added[1].shape, found.added[1].dtype
        if shape not in (found.result.shape, found.result.shape[-1:]) or dtype != found.result.dtype:
            return "what is added is neither a row nor as large as the result, or has another type"
        return _is_flat(found)

    def compute(self, found: _Matmul) -> _Compute:
        columns, (k, n) = _columns(found), (int(found.left[1].shape[-1]), int(found.result.shape[-1]))
        row = found.added is None or len(found.added[1].shape) == 1

        def compute(left: Any, right: Any, bias: Any, added: Any) -> Any:
            term = bias if added is None else added
            return torch.addmm(term if row else term.reshape(-1, n), left.reshape(-1, k), columns(right))

        return compute


class _AddmmActivation:
    """``aten._addmm_activation``: on CUDA its GELU is the one by tanh."""

    def refuse(self, found: _Matmul) -> str | None:
        if found.bias is None:
            return "there is no bias"
        assert found.after is not None
        if found.after.op == _GELU and found.after.attrs.get("approximate") != "tanh":
            return "its GELU is the one by tanh"
        return _is_flat(found)

    def compute(self, found: _Matmul) -> _Compute:
        assert found.after is not None
        columns, k, gelu = _columns(found), int(found.left[1].shape[-1]), found.after.op == _GELU
        op = _aten._addmm_activation.default

        def compute(left: Any, right: Any, bias: Any, _: Any) -> Any:
            return op(bias, left.reshape(-1, k), columns(right), use_gelu=gelu)

        return compute


class _OneDnn:
    """oneDNN's inner product, as TorchInductor calls it, on a weight that is not packed."""

    def refuse(self, found: _Matmul) -> str | None:
        if not torch.backends.mkldnn.is_available():
            return "PyTorch was built without oneDNN"
        dtype = found.left[1].dtype
        if dtype != "float32" and not getattr(torch.ops.mkldnn, f"_is_mkldnn_{_SHORT[dtype]}_supported")():
            return f"oneDNN does not compute in {dtype} here"
        return None if _is_contiguous(found.right[1]) else "the weight is not contiguous"

    def compute(self, found: _Matmul) -> _Compute:
        after = found.after
        name = "none" if after is None else _POSTS[after.op]
        algorithm = str(after.attrs.get("approximate", "none")) if after is not None and after.op == _GELU else ""
        op = torch.ops.mkldnn._linear_pointwise.default

        def compute(left: Any, right: Any, bias: Any, _: Any) -> Any:
            return op(left, right, bias, name, [], algorithm)

        return compute


_SHORT = {"float16": "fp16", "bfloat16": "bf16"}
_POSTS = {_RELU: "relu", _GELU: "gelu", _SILU: "swish"}


class _Batched:
    """One matmul for each of a batch's matrices, all with one right operand."""

    def refuse(self, found: _Matmul) -> str | None:
        if len(found.left[1].shape) != 3 or found.left[1].shape[0] == 1:
            return "there is no batch"
        return _is_flat(found)

    def compute(self, found: _Matmul) -> _Compute:
        columns, batch = _columns(found), int(found.left[1].shape[0])

        def compute(left: Any, right: Any, bias: Any, _: Any) -> Any:
            wide = columns(right).expand(batch, -1, -1)
            return torch.bmm(left, wide) if bias is None else torch.baddbmm(bias, left, wide)

        return compute


class _Unbatched:
    """One matmul for a whole batch that reads one right operand."""

    def refuse(self, found: _Matmul) -> str | None:
        left, right = found.left[1], found.right[1]
        if len(right.shape) != 3 or len(left.shape) != 3:
            return "there is no batch"
        if left.shape[0] != found.result.shape[0]:
            return "the left operand is broadcast"
        return None if right.shape[0] == 1 or right.strides[0] == 0 else "every matrix has its own right operand"

    def compute(self, found: _Matmul) -> _Compute:
        k = int(found.left[1].shape[-1])

        def compute(left: Any, right: Any, _: Any, __: Any) -> Any:
            return torch.mm(left.reshape(-1, k), right[0])

        return compute


class _Gemv:
    """A matrix times a vector."""

    def refuse(self, found: _Matmul) -> str | None:
        return _is_flat(found) if found.rows == 1 else "it has several rows"

    def compute(self, found: _Matmul) -> _Compute:
        k, transposed = int(found.left[1].shape[-1]), not found.is_linear

        def compute(left: Any, right: Any, bias: Any, _: Any) -> Any:
            matrix, vector = right.t() if transposed else right, left.reshape(k)
            return torch.mv(matrix, vector) if bias is None else torch.addmv(bias, matrix, vector)

        return compute


def _singles(*names: str) -> frozenset[tuple[str, ...]]:
    return frozenset((name,) for name in names)


def _pairs(firsts: Sequence[str], seconds: Sequence[str]) -> frozenset[tuple[str, ...]]:
    return frozenset((first, second) for first in firsts for second in seconds)


_ALL = _singles(_LINEAR, _MM, _BMM, _ADDMM, _MATMUL)
_BOTH, _CUDA, _CPU = ("cpu", "cuda"), ("cuda",), ("cpu",)

MATMUL_CALLS = (
    MatmulCall("matmul.cublas", _CUDA, _ALL, _Preferred("Cublas")),
    MatmulCall("matmul.cublaslt", _CUDA, _ALL, _Preferred("Cublaslt")),
    MatmulCall("matmul.addmm", _BOTH, _singles(_LINEAR) | _pairs((_LINEAR, _MM, _MATMUL), (_ADD,)), _Addmm()),
    MatmulCall("matmul.addmm_activation", _CUDA, _pairs((_LINEAR, _ADDMM), (_RELU, _GELU)), _AddmmActivation()),
    MatmulCall("matmul.onednn", _CPU, _singles(_LINEAR) | _pairs((_LINEAR,), tuple(_POSTS)), _OneDnn()),
    MatmulCall("matmul.batched", _BOTH, _singles(_LINEAR, _MATMUL), _Batched()),
    MatmulCall("matmul.unbatched", _BOTH, _singles(_BMM, _MATMUL), _Unbatched()),
    MatmulCall("matmul.gemv", _BOTH, _singles(_LINEAR, _MM, _ADDMM, _MATMUL), _Gemv()),
)
