"""Stored configurations of the back ends for GPUs, turned into source as a dispatch would, without a GPU."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import ir_samples
from database_mutations import Canary, is_impossible
from search_records import tuning

from fuseplan.kernels.ir.backend import SM90, Backend, BuildError, Config
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.search.errors import DatabaseError
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import RecordKey, Trial, TuningRecord

DEVICE = "cuda-sample-132"


@functools.cache
def _kernels() -> Mapping[str, tuple[Backend, KernelIR]]:
    """A kernel for each back end, by the workload of its records."""
    folder = Path(tempfile.mkdtemp(prefix="writers-"))
    irs = (ir_samples.swiglu(5, 70, "bfloat16").ir, ir_samples.rms_norm(37, 3000).ir)
    makers = (TritonBackend(folder), NinetoothedBackend(folder))
    return {
        f"{number:x}{place:x}" * 32: (maker, ir)
        for number, maker in enumerate(makers, 10) for place, ir in enumerate(irs)
    }


def gpu_records() -> Iterator[tuple[TuningRecord, Trial]]:
    """What a tune of these kernels would leave."""
    for workload, (backend, ir) in _kernels().items():
        config = dict(backend.default_config(ir, SM90))
        sample = tuning(workload, DEVICE)
        finalists = tuple(replace(one, backend=backend.name, config=config) for one in sample.finalists[1:])
        record = replace(
            sample, label=f"gpu {workload[:2]}", backend=backend.name, config=config, rejected=(), finalists=finalists
        )
        yield record, Trial(RecordKey(workload, DEVICE), backend.name, config, 5.0)


def sources_of(path: Path, canary: Canary) -> list[str]:
    """What is wrong with the sources that stored configurations lead to: those of no search are refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Database(path, "read") as database:
                records = [one for one in database.records() if one.key.workload in _kernels()]
                trials = [trial for key in {one.key for one in records} for trial in database.trials(key)]
    except DatabaseError:
        return []
    wrong = []
    for one in (*records, *trials):
        backend = _back_ends().get(one.backend)
        if backend is None:
            continue
        ir = _kernels()[one.key.workload][1]
        if backend.default_config(ir, SM90).keys() - one.config.keys():  # dispatch asks before it has a kernel built
            wrong += [] if backend.refuse_config(ir, one.config, SM90) else [f"{one.backend} takes half a config"]
            continue
        try:
            source = _source(backend, ir, one.config)
        except Exception as error:
            wrong.append(f"{one.backend} fails at a stored configuration: {type(error).__name__}: {error}")
            continue
        if source and is_impossible(one.config, one.backend):
            wrong.append(f"{one.backend} turns a configuration into source that no search chooses")
        if any(text in source for text in (str(canary.file), "<script>", "\x1b")):
            wrong.append(f"stored text reached {one.backend}'s source")
    return wrong


def _back_ends() -> dict[str, Backend]:
    return {backend.name: backend for backend, _ in _kernels().values()}


def _source(backend: Backend, ir: KernelIR, config: Config) -> str:
    """The text that a kernel is compiled from; empty where the back end refuses the configuration."""
    try:
        return backend.source(ir, config)
    except BuildError:
        return ""
