"""Names for the dynamic sizes of a trace: ``s0``, ``s1``, ... in order of first use, so that keys are stable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import FloorDiv

from fuseplan.kernels.ir.index import Size, as_size, number, symbol
from fuseplan.planner.errors import CaptureError


@dataclass
class SizeNames:
    """Renames the symbols of one trace, and names what is no polynomial in them.

    Kernels and addresses know integer polynomials. Any other number that the trace computes from sizes, such as
    ``(s0 + 1) // 2`` or ``sqrt(s0)``, is a symbol of its own with a definition; so is a float argument of the model.

    Attributes:
        hints: The value that each symbol had during the trace: a float for a symbol that is no integer.
        derived: What the symbols that depend on others are, as expressions over the renamed symbols of the trace.
    """

    hints: dict[str, int | float] = field(default_factory=dict)
    derived: dict[str, sympy.Basic] = field(default_factory=dict)
    _renamed: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    _named: dict[sympy.Basic, sympy.Symbol] = field(default_factory=dict)

    def size(self, value: int | torch.SymInt) -> Size:
        """A size or stride: a number, or a polynomial over the symbols; CaptureError where data decide it."""
        if isinstance(value, int):
            return value
        if not value.node.expr.is_Symbol and statically_known_true(value == 1):
            return 1  # the trace holds for no other: what has this size is broadcast, whatever its expression says
        return as_size(self._polynomial(self._rename(value)))

    def expression(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
        """A scalar that the trace computes from sizes: a Python constant, a polynomial, or a symbol."""
        renamed = self._rename(value)
        if isinstance(renamed, sympy.Integer):
            return int(renamed)
        if isinstance(renamed, sympy.Float | sympy.Rational):
            return float(renamed)
        if renamed in (sympy.true, sympy.false):
            return bool(renamed)
        if isinstance(value, torch.SymInt):
            return as_size(self._polynomial(renamed))
        return renamed if renamed.is_Symbol else self._name(renamed, real=True)

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
                name = f"s{len(self.hints)}"
                self._renamed[free] = symbol(name) if isinstance(hint, int) else sympy.Symbol(name, real=True)
                self.hints[name] = hint
        renamed: sympy.Basic = expression.xreplace(self._renamed)
        return renamed.replace(FloorDiv, _divided) if renamed.has(FloorDiv) else renamed

    def _polynomial(self, size: sympy.Basic) -> sympy.Basic:
        """An integer expression with every part that is no polynomial replaced by its name."""
        if size.is_Symbol or size.is_Integer:
            return size
        if (size.is_Add or size.is_Mul) and all(part.is_integer for part in size.args):
            return size.func(*map(self._polynomial, size.args))
        if size.is_Pow and size.exp.is_Integer and size.exp.is_nonnegative:
            return self._polynomial(size.base) ** size.exp
        return self._name(size, integer=True, nonnegative=size.is_nonnegative or None)

    def _name(self, definition: sympy.Basic, **assumptions: bool | None) -> sympy.Symbol:
        if definition not in self._named:
            name = f"s{len(self.hints)}"
            self._named[definition] = sympy.Symbol(name, **assumptions)
            self.derived[name] = definition
            hint = number(definition, self.hints)
            self.hints[name] = hint if "integer" in assumptions else float(hint)
        return self._named[definition]


def _divided(size: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    """A division without remainder as what it is: kernels take polynomials. Sizes are positive, so nothing is lost."""
    quotient = sympy.cancel(size / divisor)
    return quotient if quotient.as_numer_denom()[1] == 1 else FloorDiv(size, divisor)


def _hint(value: Any, free: sympy.Symbol) -> int | float:
    """The value of a symbol during the trace."""
    environment = value.node.shape_env
    for table in ("backed_var_to_val", "var_to_val"):
        known = getattr(environment, table, {})
        if free in known:
            return int(known[free]) if isinstance(known[free], int | sympy.Integer) else float(known[free])
    raise CaptureError(
        f"size {free} depends on the data in a tensor; such a model runs unfused (compute the size outside it)"
    )
