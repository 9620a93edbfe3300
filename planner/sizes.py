"""Names for the dynamic sizes of a trace: ``s0``, ``s1``, ... in order of first use, so that keys are stable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from fuseplan.kernels.index import Size, as_size, symbol
from fuseplan.planner.errors import CaptureError


@dataclass
class SizeNames:
    """Renames the symbols of one trace.

    Attributes:
        hints: The value that each renamed symbol had during the trace.
    """

    hints: dict[str, int] = field(default_factory=dict)
    _renamed: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)

    def size(self, value: int | torch.SymInt) -> Size:
        """A size or stride: a number, or an expression over the renamed symbols.

        Raises:
            CaptureError: The size depends on the data in a tensor.
        """
        if isinstance(value, int):
            return value
        return as_size(self._rename(value))

    def expression(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
        """A scalar that the trace computes from sizes: a Python constant, or an expression."""
        renamed = self._rename(value)
        if isinstance(renamed, sympy.Integer):
            return int(renamed)
        if isinstance(renamed, sympy.Float | sympy.Rational):
            return float(renamed)
        return bool(renamed) if renamed in (sympy.true, sympy.false) else renamed

    def plain(self, value: Any) -> Any:
        """An argument as data: torch objects by name (``"bfloat16"``), lists as tuples, sizes renamed."""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.expression(value)
        if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
            return str(value).removeprefix("torch.")
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, list | tuple):
            return tuple(self.plain(item) for item in value)
        return value

    def _rename(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Basic:
        expression = value.node.expr
        for free in sorted(expression.free_symbols, key=str):
            if free not in self._renamed:
                hint = _hint(value, free)
                name = symbol(f"s{len(self._renamed)}")
                self._renamed[free] = name
                self.hints[name.name] = hint
        renamed: sympy.Basic = expression.xreplace(self._renamed)
        return renamed.replace(FloorDiv, _divided) if renamed.has(FloorDiv) else renamed


def _divided(size: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    """A division without remainder as what it is: kernels take polynomials. Sizes are positive, so nothing is lost."""
    quotient = sympy.cancel(size / divisor)
    return quotient if quotient.as_numer_denom()[1] == 1 else FloorDiv(size, divisor)


def _hint(value: Any, free: sympy.Symbol) -> int:
    """The value of a symbol during the trace."""
    environment = value.node.shape_env
    for table in ("backed_var_to_val", "var_to_val"):
        known = getattr(environment, table, {})
        if free in known:
            return int(known[free])
    raise CaptureError(
        f"size {free} depends on the data in a tensor; such a model runs unfused (compute the size outside it)"
    )
