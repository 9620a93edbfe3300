"""CUDA graphs on a CPU: recording runs nothing that lasts, a replay computes into the memory that was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fuseplan.planner.runtime.replay_arguments import NotRecordable


@dataclass
class FakeRecorder:
    """A recorder whose replays write where the recording's results lie, and read the very tensors it was made with.

    Attributes:
        is_busy: What ``busy`` answers.
        refusal: Why recording fails, None when it does not.
        recorded, replayed: How often.
        seen: Arguments of the recordings.
    """

    is_busy: bool = False
    refusal: str | None = None
    recorded: int = 0
    replayed: int = 0

    def __post_init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def busy(self) -> bool:
        return self.is_busy

    @contextmanager
    def turn(self) -> Iterator[None]:
        yield

    def record(self, function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Callable[[], None]]:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        generator = torch.get_rng_state()
        if self.refusal is not None:
            raise NotRecordable(self.refusal)
        outputs = function(*args)
        for tensor, old in zip(tensors, before, strict=True):
            if not torch.equal(tensor, old):
                tensor.copy_(old)
        torch.set_rng_state(generator)
        self.recorded += 1
        number = len(self.seen)
        self.seen.append(tuple(args))
        owned = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        results = [one for one in outputs if isinstance(one, torch.Tensor) and one.numel()]
        fresh = [one for one in results if one.untyped_storage().data_ptr() not in owned]
        for one in fresh:
            _bytes(one).fill_(0xA5)  # nothing is computed until the first replay

        def replay() -> None:
            self.replayed += 1
            again = function(*self.seen[number])
            computed = [one for one in again if isinstance(one, torch.Tensor) and one.numel()]
            for old, new in zip(results, computed, strict=True):
                if old.untyped_storage().data_ptr() not in owned:
                    _bytes(old).copy_(_bytes(new))

        return outputs, replay


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All memory of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
