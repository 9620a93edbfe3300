"""What tuning one group may cost: trials, seconds, rounds, limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fuseplan.costmodel.devices import is_cpu
from fuseplan.search import policy


@dataclass(frozen=True)
class Budget:
    """What one subject may cost. The first batch and the decision are always run.

    Attributes:
        trials: Configurations, over all back ends; ``steep_trials`` where times depend much on them.
        backends: How many of the back ends take part at most, the preferred ones; None for all that can.
        seconds: Of proposing, compiling and screening.
        screen_s: Of samples for one screening; ``decide_s``: of interleaved rounds for the decision.
        finalists: Challengers in the decision, beside the default and the unfused chain.
        job_limit_s: After how long without a sign a job in a worker counts as hanging, beside what its calls take.
    """

    trials: int = 12
    steep_trials: int = 96
    backends: int | None = None
    seconds: float = 6.0
    screen_s: float = 0.08
    decide_s: float = 0.5
    finalists: int = 3
    job_limit_s: float = policy.JOB_LIMIT_S

    @staticmethod
    def on(
        device_type: str, trials: int | None = None, seconds: float | None = None, job_limit_s: float | None = None
    ) -> Budget:
        """The usual budget on a device, where not said otherwise.

        A GPU's times vary less, and its default configurations are near the bandwidth: fewer trials and shorter runs.
        """
        usual = Budget() if is_cpu(device_type) else Budget(trials=8, decide_s=0.1)
        said: dict[str, Any] = {
            "trials": trials, "steep_trials": trials, "seconds": seconds, "job_limit_s": job_limit_s}
        return replace(usual, **{name: value for name, value in said.items() if value is not None})

    def minor(self) -> Budget:
        """For a subject that hardly counts: the preferred back end's default configuration and one more."""
        few = min(2, self.trials)
        return replace(self, trials=few, steep_trials=few, backends=1, finalists=1, decide_s=self.decide_s / 4)
