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
        twice = attempt[0].name if attempt else jobs.UNFUSED
        outcome = run(attempt, twice)
        if outcome.ok:
            decision: jobs.Decision = outcome.value
            standing = [choice for choice in attempt if choice.name in decision.contest.samples]
            failed |= decision.failed
            return _record(subject, key, standing, decision, failed, verdicts, choices, evidence)
        failed |= {choice.name: f"the decisive run failed: {outcome.failure}" for choice in attempt}
    raise SubjectError(f"{subject.label}: the unfused chain cannot be timed: {outcome.failure}")


def _record(
    subject: Subject, key: RecordKey, standing: Sequence[jobs.Entrant], decision: jobs.Decision,
    failed: Mapping[str, str], verdicts: Verdicts, choices: Sequence[jobs.Entrant], evidence: Evidence
) -> TuningRecord:
    contest = decision.contest
    by_name = {choice.name: choice for choice in standing}
    between = decision.device or contest
    best = by_name[_winner(standing, between)] if standing else None
    fuse = best is not None and contest.accepts(best.name, jobs.UNFUSED)
    gain = contest.gain(best.name, jobs.UNFUSED) if best is not None else 0.0
    undecided = best is not None and contest.undecided(best.name, jobs.UNFUSED)
    trial = _trial_of(best, verdicts.trials)
    named = {choice.name: choice for choice in choices}
    rejected = [
        *(Rejection(named[name].backend.name, dict(named[name].config), why) for name, why in failed.items()
          if name not in by_name),
        *(Rejection(trial.backend, trial.config, trial.reason) for trial in verdicts.trials if trial.reason),
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
        default_gain=between.gain(best.name, "default") if best is not None and "default" in by_name else 0.0,
        threshold=contest.threshold,
        error=trial.error or 0.0 if trial is not None else 0.0,
        eager_error=decision.eager_error,
        finalists=tuple(_finalists(standing, contest)),
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


def _winner(standing: Sequence[jobs.Entrant], contest: Contest) -> str:
    """The best kernel. One of another back end than the preferred has to be better by more than tunes differ in."""
    first = standing[0]
    best = contest.winner(first.name, [one.name for one in standing[1:]])
    kin = {one.name for one in standing if one.backend.name == first.backend.name}
    if best in kin:
        return best
    own = contest.winner(first.name, [one.name for one in standing[1:] if one.name in kin])
    runs = contest.conditions or (contest,)
    return best if all(one.gain(best, own) > policy.OTHER_BACKEND_GAIN for one in runs) else own


def _finalists(standing: Sequence[jobs.Entrant], contest: Contest) -> list[Finalist]:
    listed = [Finalist(jobs.UNFUSED, "", {}, contest.time(jobs.UNFUSED), 0.0)]
    for choice in standing:
        gain = contest.gain(choice.name, jobs.UNFUSED)
        listed.append(Finalist(choice.name, choice.backend.name, dict(choice.config), contest.time(choice.name), gain))
    return listed


def _trial_of(best: jobs.Entrant | None, trials: Sequence[Trial]) -> Trial | None:
    if best is None:
        return None
    wanted = (best.backend.name, config_key(best.config))
    return next((trial for trial in trials if (trial.backend, config_key(trial.config)) == wanted), None)


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
