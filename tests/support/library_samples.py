"""Groups that libraries may run, made from tensors, and whether a call's result is as good as eager's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuseplan.planner.graph.dataflow import OpNode, TensorSpec
from fuseplan.planner.graph.execute import run_node
from fuseplan.planner.libraries.library_call import LibraryCall, OpGroup

ATTENTION = "aten.scaled_dot_product_attention.default"
MASKS = ("none", "causal", "numbers", "boolean", "rows without keys")


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tuple(tensor.stride()))


@dataclass(frozen=True)
class Sample:
    """An op with its operands."""

    group: OpGroup
    operands: tuple[torch.Tensor, ...]

    def run_op(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        values = dict(zip(self.group.inputs, operands, strict=True))
        (result,) = run_node(self.group.node, [values[name] for name in self.group.node.inputs])
        return result

    @property
    def terms(self) -> int:
        """How many products a number of the result sums: of attention those of a score, and then those with values."""
        shapes = [self.group.specs[name].shape for name in self.group.node.inputs]
        if self.group.node.op == ATTENTION:
            return int(shapes[0][-1] + shapes[1][-2])
        return int(shapes[self.group.node.op == "aten.addmm.default"][-1])

    def eager(self) -> torch.Tensor:
        return self.run_op(self.operands)

    def exact(self) -> torch.Tensor:
        return self.run_op([one.double() if one.is_floating_point() else one for one in self.operands])


def sample(node: OpNode, operands: dict[str, torch.Tensor]) -> Sample:
    """The group of an op with one result, laid out as eager mode lays it out."""
    (device,) = {one.device.type for one in operands.values()}
    specs = {name: spec_of(one) for name, one in operands.items()}
    made = Sample(OpGroup(node, tuple(operands), node.outputs, specs, device), tuple(operands.values()))
    return replace(made, group=replace(made.group, specs=specs | {node.name: spec_of(made.eager())}))


def product(
    op: str, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None, **attrs: Any
) -> Sample:
    operands = {"left": left, "right": right} | ({} if bias is None else {"bias": bias})
    names = ("bias", "left", "right") if op == "addmm" else tuple(operands)
    if op == "linear" and bias is None:
        attrs["bias"] = None
    return sample(OpNode(f"aten.{op}.default", names, ("product",), attrs), operands)


def linear(*shape: int, n: int = 16, bias: bool = True, dtype: torch.dtype = torch.float32) -> Sample:
    torch.manual_seed(n)
    left, right = torch.randn(*shape, dtype=dtype), torch.randn(n, shape[-1], dtype=dtype)
    return product("linear", left, right, torch.randn(n, dtype=dtype) if bias else None)


def on_cuda(given: Sample) -> Sample:
    return replace(given, group=replace(given.group, device_type="cuda"))


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, **attrs: Any
) -> Sample:
    operands = {"query": query, "key": key, "value": value}
    if mask is None:
        attrs = {"attn_mask": None, **attrs}
    else:
        operands["mask"] = mask
    return sample(OpNode(ATTENTION, tuple(operands), ("found",), attrs), operands)


def mask_of(kind: str, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor | None:
    """A mask of one of the kinds in ``MASKS``; every row sees a key, but for ``"rows without keys"``."""
    if kind in ("none", "causal"):
        return None
    seen = torch.rand(*shape, device=device) > 0.4
    seen[..., 0] = True
    if kind == "rows without keys":
        seen[..., -1, :] = False
    if kind != "numbers":
        return seen
    return torch.where(seen, torch.randn(*shape, device=device), -math.inf).to(dtype)


def heads(
    batch: int, count: int, length: int, width: int, dtype: torch.dtype = torch.float32, device: str = "cpu",
    transposed: bool = False,
) -> torch.Tensor:
    """``[batch, heads, length, width]``, as a projection leaves it if transposed."""
    if transposed:
        return torch.randn(batch, length, count, width, dtype=dtype, device=device).transpose(1, 2)
    return torch.randn(batch, count, length, width, dtype=dtype, device=device)


def run(call: LibraryCall, given: Sample) -> torch.Tensor:
    return call.build(given.group)(*given.operands)


def assert_as_good_as_eager(call: LibraryCall, given: Sample, slack: float = 2.0) -> None:
    """Layout and type of eager mode, and an error against float64 that is not beyond ``slack`` times its own.

    Beside that a result may be off by a few roundings to its type, and by one rounding of each sum on the way to it:
    kernels sum in float32 at least, and float64 is no more exact than what it checks where that is float64, too.
    """
    result, eager, exact = run(call, given), given.eager(), given.exact()
    assert result.shape == eager.shape and result.dtype == eager.dtype
    same = [its == own for size, its, own in zip(eager.shape, eager.stride(), result.stride(), strict=True) if size > 1]
    assert all(same), (call.name, eager.stride(), result.stride())
    summed = torch.promote_types(eager.dtype, torch.float32)
    rounding = 8 * torch.finfo(eager.dtype).eps + given.terms * torch.finfo(summed).eps
    allowed = slack * (eager - exact).abs().max().item() + rounding * max(1.0, exact.abs().max().item())
    error = (result - exact).abs().max().item()
    assert error <= allowed, f"{call.name}: error {error:.3g}, allowed {allowed:.3g}"
