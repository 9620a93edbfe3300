"""The last step of a tune: from finalists to an answer with its evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fuseplan.kernels.ir.backend import config_key
from fuseplan.search import policy
from fuseplan.search.errors import SubjectError
from fuseplan.search.store.record import Evidence, Finalist, RecordKey, Rejection, Trial, TuningRecord, now
from fuseplan.search.timing.contest import Contest
from fuseplan.search.timing.subject import Subject
from fuseplan.search.workers import jobs
from fuseplan.search.workers.worker import Outcome


@dataclass(frozen=True)
class Verdicts:
    """What the trials showed: outcomes, back ends that refused, size of the space."""

    trials: tuple[Trial, ...]
    refusals: Mapping[str, str]
    enumerated: int


def decide_group(
    run: Callable[[Sequence[jobs.Entrant], str], Outcome], subject: Subject, key: RecordKey,
    choices: Sequence[jobs.Entrant], verdicts: Verdicts, evidence: Evidence
) -> TuningRecord:
    """Run the finalists (``choices``, the incumbent first) against the unfused chain and write down the answer.

    ``run`` times choices, one of them or the chain twice. One that crashes or hangs is repeated with the first choice
    alone, then with the unfused chain alone. ``evidence`` says versions and seed; the rest of it is filled in.
    """
    failed: dict[str, str] = {}
    for size in sorted({len(choices), min(1, len(choices)), 0}, reverse=True):
        attempt = tuple(choices[:size])
        outcome = run(attempt, attempt[0].name if attempt else jobs.UNFUSED)
        if outcome.ok:
            return _record(subject, key, choices, outcome.value, failed, verdicts, evidence)
        failed |= {choice.name: f"the decisive run failed: {outcome.failure}" for choice in attempt}
    raise SubjectError(f"{subject.label}: the unfused chain cannot be timed: {outcome.failure}")


def _record(
    subject: Subject, key: RecordKey, choices: Sequence[jobs.Entrant], decision: jobs.Decision,
    failed: Mapping[str, str], verdicts: Verdicts, evidence: Evidence
) -> TuningRecord:
    contest = decision.contest
    standing = [choice for choice in choices if choice.name in contest.samples]
    between = decision.device or contest
    best = _winner(standing, between) if standing else None
    fuse = best is not None and contest.accepts(best.name, jobs.UNFUSED)
    gain = contest.gain(best.name, jobs.UNFUSED) if best is not None else 0.0
    undecided = best is not None and contest.undecided(best.name, jobs.UNFUSED)
    errors = {(trial.backend, config_key(trial.config)): trial.error for trial in verdicts.trials}
    why = {**failed, **decision.failed}
    rejected = [
        *(Rejection(choice.backend.name, dict(choice.config), why[choice.name])
          for choice in choices if choice.name not in contest.samples),
        *(Rejection(trial.backend, trial.config, trial.reason) for trial in verdicts.trials if trial.reason),
    ]
    kernels = [
        Finalist(one.name, one.backend.name, dict(one.config), contest.time(one.name),
                 contest.gain(one.name, jobs.UNFUSED)) for one in standing
    ]
    return TuningRecord(
        key=key,
        label=subject.label,
        fuse=fuse,
        backend=best.backend.name if best is not None else "",
        config=dict(best.config) if best is not None else {},
        fused=contest.time(best.name) if best is not None else None,
        unfused=contest.time(jobs.UNFUSED),
        gain=gain,
        default_gain=between.gain(best.name, "default") if best is not None and standing[0].name == "default" else 0.0,
        threshold=contest.threshold,
        error=errors.get((best.backend.name, config_key(best.config))) or 0.0 if best is not None else 0.0,
        eager_error=decision.eager_error,
        finalists=(Finalist(jobs.UNFUSED, "", {}, contest.time(jobs.UNFUSED), 0.0), *kernels),
        rejected=tuple(rejected[:policy.REJECTIONS_LIMIT]),
        refusals=dict(verdicts.refusals),
        enumerated=verdicts.enumerated,
        compiled=sum(not trial.uncompiled for trial in verdicts.trials),
        measured=sum(trial.median_us is not None for trial in verdicts.trials),
        work=subject.work,
        resources=dict(decision.resources[best.name]) if best is not None else {},
        evidence=replace(
            evidence, created=now(), clocks_mhz=decision.clocks_mhz,
            reason=_no_verdict(gain, contest) if undecided else _reason(best, fuse, gain, contest.threshold, verdicts),
        ),
        undecided=undecided,
    )


def _winner(standing: Sequence[jobs.Entrant], contest: Contest) -> jobs.Entrant:
    """The best kernel. One of another back end than the preferred has to be better by more than tunes differ in."""
    first = standing[0]
    by_name = {one.name: one for one in standing}
    best = contest.winner(first.name, list(by_name)[1:])
    if by_name[best].backend.name != first.backend.name:
        own = contest.winner(
            first.name, [one.name for one in standing[1:] if one.backend.name == first.backend.name])
        runs = contest.conditions or (contest,)
        best = best if all(one.gain(best, own) > policy.OTHER_BACKEND_GAIN for one in runs) else own
    return by_name[best]


def _no_verdict(gain: float, contest: Contest) -> str:
    return f"no verdict: a gain of {gain:.1%} over the unfused chain, measured with a noise of {contest.noise:.0%}"


def _reason(best: jobs.Entrant | None, fuse: bool, gain: float, threshold: float, verdicts: Verdicts) -> str:
    if best is None:
        reasons = [f"{name}: {reason}" for name, reason in verdicts.refusals.items()]
        reasons += [trial.reason for trial in verdicts.trials if trial.reason]
        return "no kernel works: " + ("; ".join(dict.fromkeys(reasons))[:500] or "no back end was given")
    if fuse:
        return f"the kernel takes {gain:.1%} less time than the unfused chain (threshold {threshold:.1%})"
    if gain > 0:
        return f"the gain of {gain:.1%} over the unfused chain is within the threshold of {threshold:.1%}"
    return f"the best kernel is {-gain:.1%} slower than the unfused chain"
