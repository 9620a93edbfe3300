"""Jobs of a tune in the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from fuseplan.search.workers.supervisor import of_machine
from fuseplan.search.workers.worker import Outcome


class InlineExecutor:
    """Runs jobs in this process: no isolation and no time limit. It can stand for a pool, too."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        pass

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float) -> Outcome:
        try:
            return Outcome(function(*args))
        except Exception as error:
            return Outcome(failure=f"{type(error).__name__}: {error}", of_machine=of_machine(error))

    def submit(self, function: Callable[..., Any], *args: Any, limit_s: float) -> Callable[[], Outcome]:
        outcome = self.call(function, *args, limit_s=limit_s)
        return lambda: outcome

    def map(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], limit_s: float
    ) -> Iterator[Outcome]:
        return (self.call(function, *args, limit_s=limit_s) for args in arguments)

    def prefetch(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], limit_s: float, spare: bool = False
    ) -> None:
        """Nothing: there is only this process, and it is not idle."""

    def close(self) -> None:
        pass
