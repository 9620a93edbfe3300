"""Random programs of a few ops, and a plan store without plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from hypothesis import strategies as st

from fuseplan.kernels.ir.backend import Target
from fuseplan.search.store.database import Lookup
from fuseplan.search.store.record import PlanRecord, RecordKey

CPU = Target("cpu", "native", 2)


Step = tuple[str, int, int]


#: name -> (values, number of one operand, number of another) -> a new value, or None when an operand was written.
STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda a, b: a + b[:1],
    "mul": lambda a, b: a * b.mean(-1, keepdim=True)[:1],
    "silu": lambda a, b: torch.nn.functional.silu(a),
    "softmax": lambda a, b: torch.softmax(a, -1),
    "rows": lambda a, b: a[1:],
    "columns": lambda a, b: a[..., ::2].repeat_interleave(2, -1)[..., : a.shape[-1]],
    "copy": lambda a, b: a.clone(),
    "cast": lambda a, b: a.to(torch.float32),
    "matmul": lambda a, b: a @ torch.eye(a.shape[-1]),
    "add_": lambda a, b: a.add_(0.5),
    "mul_": lambda a, b: a.mul_(b.detach().clone()[:1]),
    "copy_": lambda a, b: a.copy_(torch.tanh(b[:1]) + 1.0),
    "write_row": lambda a, b: a[0].fill_(2.0),
}


STEP = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9))


def program(steps: list[Step]) -> Callable[..., tuple[torch.Tensor, ...]]:
    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(inputs)
        for name, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            if a.shape[0] < 2:
                a = inputs[0]
            made = STEPS[name](a, b)
            if made.dim() == 2:
                values.append(made)
        return tuple(values[-3:])

    return run


class NothingStored:
    """A plan store without plans."""

    logs_misses = False

    def get_plans(self, keys: Iterable[RecordKey]) -> dict[RecordKey, Lookup[PlanRecord]]:
        return dict.fromkeys(keys, Lookup())

    def capture_names(self, prefix: str) -> set[str]:
        return set()

    def log_misses(self, *args: Any) -> bool:
        return False
