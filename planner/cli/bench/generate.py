"""``plan bench generate``: Hugging Face's ``generate()``, compiled by nobody, by itself and by our back end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fuseplan.costmodel.devices import is_gpu
from fuseplan.planner.cli.bench import patterns
from fuseplan.planner.cli.output.options import current

if TYPE_CHECKING:
    from fuseplan.planner.bench.generate import GenerateRow, Sizes
    from fuseplan.planner.models.sources import ModelSource
    from fuseplan.planner.tuning.session import Session

#: Unless the user says otherwise: sequences, tokens of a prompt, and new ones.
_BATCHES, _PROMPT, _NEW = "1,16", 512, 128
#: Of rounds for each batch size: one round of a large model takes several.
SECONDS = 30.0


def results_name(source: ModelSource, sizes: Sequence[Sizes]) -> str:
    """Name of the results: other sizes do not take the place of a published result."""
    text = f"{','.join(str(one.batch) for one in sizes)}x{sizes[0].prompt}+{sizes[0].new}"
    return source.label if text == f"{_BATCHES}x{_PROMPT}+{_NEW}" else f"{source.label} {text}"


def sizes_of(source: ModelSource, batches: str | None, prompt: int | None, new: int | None) -> list[Sizes]:
    """The sizes that the options name; ConfigError where the model cannot be asked for one of them."""
    from fuseplan.planner.bench.generate import Sizes, check_sizes
    from fuseplan.planner.errors import Argument, ConfigError
    from fuseplan.planner.models.workload import read_size

    text = _BATCHES if batches is None else batches
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError("--batch is empty; write it like --batch 1,16")
    numbers = dict.fromkeys(read_size(word, Argument("batch"), "1,16") for word in words)
    found = [Sizes(number, _PROMPT if prompt is None else prompt, _NEW if new is None else new) for number in numbers]
    for one in found:
        check_sizes(source, one)
    return found


def measure(
    session: Session, source: ModelSource, sizes: Sequence[Sizes], names: Sequence[str], seconds: float,
    out: Path | None,
) -> None:
    """Time the contestants at each size, ``seconds`` of rounds each, and publish what there is whatever happens."""
    from fuseplan.planner.bench.generate import bench_generate
    from fuseplan.planner.models.build import build_model

    rows: list[GenerateRow] = []
    try:
        with current().status(f"building {source.label}") as say:
            module = build_model(source, session.target.device_type).module
            for one in sizes:
                say(f"{source.label}, {one.label}: compiling and measuring every contestant")
                rows += bench_generate(session, module, one, names, seconds)
    finally:  # an interrupted bench keeps what it has measured
        if rows:
            _publish(session, source, sizes, rows, out)


def _publish(
    session: Session, source: ModelSource, sizes: Sequence[Sizes], rows: Sequence[GenerateRow], out: Path | None
) -> None:
    from fuseplan.planner.bench.generate import LEGEND, generate_table, generate_verdict
    from fuseplan.planner.bench.rows import bench_frame

    frame = bench_frame(rows)
    table = generate_table(frame)
    current().table(table, "generate", f"{source.label}, generate(): ms a token", spare=("p20", "p80"),
                    keep=("workload", "contestant", "ms_token", "vs_inductor"))
    said = generate_verdict(frame)
    if frame["floor_us"].isna().all():
        said.append("what reading the weights takes is unknown: the device was never probed (`plan probe`), or a "
                    "token chooses its weights")
    if any(" misses" in row.note for row in rows):
        said.append(f"what was missed is tuned by: {tune_command(source, sizes, session.target.device_type)}")
    name = results_name(source, sizes)
    patterns.publish(session, name, {"generate": frame}, said, out, {"generate": table}, LEGEND)


def tune_command(source: ModelSource, sizes: Sequence[Sizes], device_type: str) -> str:
    """The ``plan tune`` of the very calls that were measured. A config is named by its file alone."""
    named = f"--model {source.name}" if source.kind == "preset" else f"--config {Path(source.name).name}"
    words = [f"plan tune {named}"]
    words += [f"--layers {source.layers}"] if source.layers else []
    words += [f"--dtype {source.dtype}"] if source.dtype else []
    first, batches = sizes[0], [one.batch for one in sizes]
    prefills = ",".join(f"{batch}x{first.prompt}" for batch in batches)
    words += [f"--decode {','.join(map(str, batches))} --kv-len {first.kv_len} --prefill {prefills}"]
    # CUDA graphs have plans of their own.
    words += ["--regime graph, and the same without it"] if is_gpu(device_type) else []
    return " ".join(words)
