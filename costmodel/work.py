"""What a fusion group costs in machine terms, before any device is named.

The first four fields are the resources that a kernel must use (each distinct byte read or written once, each
arithmetic operation once), so that the same numbers serve a prediction and a lower bound. The others say how a
straightforward kernel goes about it; they serve predictions alone, and 0 stands for unknown. Fields add: the work of a
chain of kernels is the sum of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

#: Units that have a peak of their own. ``sfu`` counts special functions (exp, rsqrt, tanh, ...).
FLOP_UNITS = ("fp32", "fp64", "sfu", "bf16_matmul", "fp16_matmul", "fp32_matmul", "fp8_matmul")


@dataclass(frozen=True)
class Work:
    """Flops, bytes and launches of one kernel, or of a sequence of kernels.

    Attributes:
        flops: Arithmetic operations by unit (one of :data:`FLOP_UNITS`); a fused multiply-add counts as two.
        dram_bytes: Distinct bytes read plus bytes written, assuming nothing is in a cache.
        l2_bytes: Bytes re-read after a first pass over the same data (second pass of a reduction, a
            broadcast operand); served by the last-level cache when they fit.
        written_bytes: How many of ``dram_bytes`` are written.
        cold_bytes: How many of ``dram_bytes`` nothing has touched recently (weights).
        gathered_bytes: How many of ``dram_bytes`` are rows of a table that data chooses: the next call chooses others.
        row_bytes: Bytes of the largest part that one multiprocessor has to move by itself (a reduced row).
        row_loaded_bytes: What it loads of that, as often as it walks along it.
        special: Uses of a GPU's special-function unit, where ``flops`` counts them as other devices need them.
        steps: Instructions that wait for one another before the first result is stored.
        serial_steps: The same for a loop whose waits overlap with those of other parts of the kernel.
        views: Views that ATen makes for the op, each a call that only the host pays for; a fused kernel has none.
        call: What is called, from general to special: ``"aten.mul.Tensor.float32"``, ``"sdpa.flash"``. Calls of one
            name have times and a calibration of their own; empty for a generated kernel, and for a sum.
        elements: Positions that loops run over, on CPUs.
        lanes: What a CPU kernel's loops issue, in units of a vector instruction for one element.
        threads: CPU threads that there is enough to do for; 0 stands for all of them.
        more_results: Tensors that a CPU kernel makes beside the first: a launch mostly makes the one that it returns.
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    dram_bytes: float = 0.0
    l2_bytes: float = 0.0
    launches: int = 0
    written_bytes: float = 0.0
    cold_bytes: float = 0.0
    row_bytes: float = 0.0
    steps: float = 0.0
    serial_steps: float = 0.0
    gathered_bytes: float = 0.0
    special: float = 0.0
    row_loaded_bytes: float = 0.0
    views: int = 0
    call: str = ""
    elements: float = 0.0
    lanes: float = 0.0
    threads: int = 0
    more_results: int = 0
    #: Fields of stored work that predictions were no better for; they are not read.
    RETIRED: ClassVar = frozenset({"requested_bytes", "instructions", "row_instructions", "traffic"})

    def __post_init__(self) -> None:
        if unknown := set(self.flops) - set(FLOP_UNITS):
            raise ValueError(f"Work.flops has unknown units {sorted(unknown)}; known: {FLOP_UNITS}")

    def __add__(self, other: Work) -> Work:
        units = {*self.flops, *other.flops}
        rest = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        return Work({unit: self.flops.get(unit, 0.0) + other.flops.get(unit, 0.0) for unit in sorted(units)}, **rest)

    @property
    def total_flops(self) -> float:
        """All operations, whatever unit runs them."""
        return float(sum(self.flops.values()))


_SUMMED = tuple(one.name for one in fields(Work) if one.name not in ("flops", "call", "threads"))
