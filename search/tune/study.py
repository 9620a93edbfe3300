"""Searches as Optuna studies in a storage that the user names, for optuna-dashboard and other tools of Optuna's.

They are copies, written once a search has ended: nothing reads them, and what a tune finds does not depend on them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fuseplan.kernels.ir.backend import config_key
from fuseplan.search.errors import OWN_FAULTS, StudyError, plain
from fuseplan.search.store.record import Trial, TuningRecord

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

logger = logging.getLogger(__name__)
#: Letters of a label in a study's name.
_LONGEST = 200


class Studies:
    """A storage of Optuna's: an SQLAlchemy URL, or the path of a journal file; StudyError if it cannot be opened."""

    def __init__(self, where: str) -> None:
        from optuna.storages import JournalStorage, get_storage
        from optuna.storages.journal import JournalFileBackend

        self.where = where
        try:
            if "://" not in where and Path(where).is_file():
                with Path(where).open("rb") as file:
                    if file.read(6) == b"SQLite":  # a journal must not be written into it
                        raise ValueError(f"it is an SQLite file, which is written sqlite:///{where}")
            with quiet_optuna():
                self._storage = get_storage(where if "://" in where else JournalStorage(JournalFileBackend(where)))
        except Exception as error:  # SQLAlchemy's, a driver's, or the file system's
            reason = plain((str(error).splitlines() or [type(error).__name__])[0])
            raise StudyError(
                f"no studies can be kept in {plain(where)}: {reason}; name a file, or a URL like sqlite:///studies.db"
            ) from None

    def add(self, record: TuningRecord, trials: Sequence[Trial], on_device: bool = False) -> None:
        """A study of one search: its trials in their order, and its answer; what cannot be written is logged.

        A trial's value is what the search compared (us): time on the device where ``on_device``. One that was as fast
        as the winner in its short run, and did not win the decision, is pruned, so that the best trial is the winner.
        """
        import optuna

        try:
            with quiet_optuna():
                study = optuna.create_study(storage=self._storage, study_name=study_name(record), direction="minimize")
                key, fused = record.key, record.fused
                answer = {  # times in us
                    "group": record.label, "device": key.device, "regime": key.regime, "numerics": key.numerics,
                    "key": key.workload, "answer": "fuse" if record.fuse else "do not fuse",
                    "reason": record.evidence.reason, "unfused_us": record.unfused.median_us,
                    "fused_us": None if fused is None else fused.median_us, "configurations": record.enumerated,
                }
                for name, value in answer.items():
                    study.set_user_attr(name, value)
                study.add_trials(_frozen(record, trials, on_device))
        except Exception as error:
            OWN_FAULTS.tolerate(error)
            logger.warning("the study of %s is not kept in %s: %s", record.label, plain(self.where), plain(str(error)))


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna announces every study and storage; its users' own verbosity is put back."""
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)


def study_name(record: TuningRecord) -> str:
    """Group and shapes, device, regime; then what tells apart groups and searches that read the same."""
    key = record.key
    how = key.regime if key.numerics == "fp32" else f"{key.regime}, numerics {key.numerics}"
    apart = f"{key.workload[:8]} {record.evidence.created}"
    return f"{record.label[:_LONGEST]} on {key.device}, {how} [{apart}]"


def _frozen(record: TuningRecord, trials: Sequence[Trial], on_device: bool) -> Iterator[FrozenTrial]:
    from optuna.trial import TrialState, create_trial

    distributions = _distributions(trials)
    decided = {(one.backend, config_key(one.config)): one.time.median_us for one in record.finalists}
    winner = (record.backend, config_key(record.config))
    values = {
        (one.backend, config_key(one.config)): one.device_us if on_device else one.median_us for one in trials
    }
    best_us = values.get(winner)
    for trial in trials:
        key, params = (trial.backend, config_key(trial.config)), {"backend": trial.backend, **trial.config}
        value, state, reason = values[key], TrialState.COMPLETE, trial.reason
        if value is None:
            state = TrialState.FAIL
        elif best_us is not None and value <= best_us and key != winner:
            state = TrialState.PRUNED
            reason = "no faster than the winner beyond noise" if key in decided else "not in the decision"
        facts = {"reason": reason, "median_us": trial.median_us, "device_us": trial.device_us,
                 "decided_us": decided.get(key), "error": trial.error}
        yield create_trial(
            state=state, value=value if state == TrialState.COMPLETE else None, params=params,
            distributions={name: distributions[name] for name in params},
            intermediate_values={} if value is None else {0: value},
            user_attrs={name: fact for name, fact in facts.items() if fact not in (None, "")},
        )


def _distributions(trials: Iterable[Trial]) -> dict[str, BaseDistribution]:
    """What each parameter was tried at: between the least and the largest number, or among names."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    found: dict[str, dict[int | str, None]] = {}
    for trial in trials:
        for name, value in {"backend": trial.backend, **trial.config}.items():
            found.setdefault(name, {})[value] = None
    return {
        name: CategoricalDistribution(tuple(values)) if any(isinstance(one, str) for one in values)
        else IntDistribution(min(map(int, values)), max(map(int, values))) for name, values in found.items()
    }
