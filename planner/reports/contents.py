"""What a report says: its sentences and tables by topic, as one document."""

from __future__ import annotations

from fuseplan.costmodel.accuracy import accuracy_frame
from fuseplan.planner.reports import accuracy, against, frames, step_words, steps
from fuseplan.planner.reports.document import Document
from fuseplan.planner.reports.frames import ReportData

#: Of the group table, what a narrow terminal leaves out, in this order.
GROUP_SPARE = (
    "key", "doubt", "regime", "enumerated_configs", "measured_configs", "noise", "lower_bound_us", "predicted_us",
    "config", "ops", "backend", "times", "source", "answer", "fused_us", "unfused_us", "place")
#: By topic, the table that CSV has.
_MAIN = {"groups": "groups", "steps": "saved", "accuracy": "samples"}


def report_document(data: ReportData, topic: str, other: ReportData | None = None, style: str = "table") -> Document:
    """A report on ``"groups"``, ``"steps"`` or ``"accuracy"``, with another tune also what differs from that.

    For a screen (``style`` ``"table"``) it leaves out tables of steps that have nothing, or nothing that was timed;
    every single prediction is for ``"csv"`` and ``"json"`` alone.
    """
    document = Document(f"Fusion report: {data.model or data.device}", _MAIN[topic])
    if topic == "accuracy":
        _accuracy(document, data, style)
        return document
    document.tell(f"{data.model or 'everything tuned'} on {data.device}", one_line=True)
    _steps(document, data, topic, topic == "groups" and style == "table")
    if topic == "groups":
        _groups(document, data)
    if other is not None:
        for name, of in (("steps", against.steps_against), ("groups", against.groups_against)):
            title = f"{name.capitalize()} against the other database"
            document.table(of(data, other), f"{name}_against", title, shown="files")
        for line in against.against_lines(data, other):
            document.tell(line)
    return document


def _steps(document: Document, data: ReportData, topic: str, brief: bool) -> None:
    for line in step_words.step_lines(data, every=topic == "steps"):
        document.tell(line, one_line=True)
    whole, parts, saved = steps.step_frame(data), steps.part_frame(data), steps.saved_frame(data)
    if brief:
        if not any(map(len, (whole, parts, saved))):
            return
        timed = whole["workload"][whole["noise"].notna()]
        parts = parts[parts["workload"].isin(timed)] if len(timed) else parts
    times = ("unfused_us", "planned_us")
    document.table(whole, "steps", "Steps", shown="files")
    document.table(
        parts, "parts", "A step's time by part", spare=("regime", *times), keep=("workload", "part", "saved_us"))
    document.table(
        saved, "saved", "What each group saves in a step", keep=("workload", "group", "saved_us"),
        spare=("key", "doubt", "regime", "share", "runs", "place", *times, "uses"),
        shown="always" if topic == "steps" else "files")


def _groups(document: Document, data: ReportData) -> None:
    groups = frames.group_frame(data)
    document.table(
        groups, "groups", f"Fused against unfused, {data.device}", spare=GROUP_SPARE,
        keep=("workload", "group", "speedup"))
    document.table(frames.region_frame(data), "regions", "Regions", shown="files")
    if data.workloads:
        less = ("views", "ops", "planned_us", "unfused_us", "library_calls", "launches_unfused")
        document.table(
            frames.coverage_frame(data), "coverage", "Coverage", spare=less, keep=("workload", "coverage"))
    if data.misses:
        document.table(
            frames.misses_frame(data.misses), "misses", "Look-ups without a plan",
            spare=("key", "numerics", "first_seen"), keep=("label", "count"))
    document.tell(frames.headline(groups))
    if len(groups):
        document.tell(frames.average(groups), "files")


def _accuracy(document: Document, data: ReportData, style: str) -> None:
    regret = "Trusting the model alone"
    document.table(accuracy.accuracy_table(data), "accuracy", "Predicted against measured", digits=3)
    document.table(accuracy.regret_table(data), regret, regret, digits=3, spare=("key",))
    if style in ("csv", "json"):
        document.table(accuracy_frame(accuracy.accuracy_pairs(data)), "samples", "Samples")
    for line in accuracy.accuracy_text(data):
        document.tell(line)
