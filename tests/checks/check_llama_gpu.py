"""Every fused group of the Llama preset as Triton and ninetoothed kernels, without a GPU.

    python tests/checks/check_llama_gpu.py [--model llama-3.2-1b]

Captures two layers in decode and prefill, plans them by the number of launches, compiles each group's default config
for sm_90 and reads registers and spills back, then runs each kernel under Triton's interpreter against float64. Exits
with status 1 on a refusal, a spill or a wrong result. pytest does not collect it: it takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from fuseplan.kernels.ir.backend import SM90, Backend
from fuseplan.planner.capture.trace import capture
from fuseplan.planner.implementations.tunable_group import TunableGroup, group_subject
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.models.workload import decode, prefill
from fuseplan.planner.tuning.planner import Planner
from fuseplan.search.store.database import Database

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from interpret_kernels import backend_under_test, run_interpreted
from reference_backend import ReferenceBackend


def llama_subjects(model: str, folder: str) -> Iterator[TunableGroup]:
    """The distinct fused groups of decode at batch 1 and 8 and of a short prefill."""
    source = find_source(model=model, device_type="cpu", layers=2)
    seen: set[str] = set()
    for workload in (decode(1, 256), decode(8, 256), prefill(1, 16)):
        graph = capture(source, workload, "cpu")[0]
        store = Database(Path(folder) / "none.db", "read")
        # Without a GPU the GPU back ends are unavailable; any that is here lets the planner choose groups.
        plan = Planner(store, None, "none", SM90, (ReferenceBackend(),)).plan_graph(graph)
        for region in plan.unique():
            for choice in region.record.groups:
                if choice.is_kernel and choice.workload not in seen:
                    seen.add(choice.workload)
                    yield group_subject(graph, region.group_ops(choice), choice.workload)


def compiled(backend: Backend, subject: TunableGroup) -> str:
    """What the compiler says; starts with "ok" when nothing spills."""
    reason = backend.refuse(subject.ir, SM90)
    if reason is not None:
        return f"refused: {reason}"
    facts = backend.prepare(subject.ir, backend.default_config(subject.ir, SM90), SM90)
    state = "ok" if facts.spill_bytes == 0 else "SPILLS"
    return f"{state}: {facts.registers} registers, {facts.spill_bytes} spill bytes, {facts.shared_bytes} shared bytes"


def interpret(model: str, folder: str) -> None:
    """In a process with TRITON_INTERPRET=1: print the error of every kernel, in units of the tolerance, as JSON."""
    from triton_interpreter import mend

    mend()
    rows = {}
    for name in ("triton", "ninetoothed"):
        backend = backend_under_test(name, folder)
        for subject in llama_subjects(model, folder):
            inputs = subject.make_inputs(0, "cpu")
            rows[f"{name} {subject.label} {subject.key[:8]}"] = run_interpreted(backend, subject.ir, inputs)
    print(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--interpret", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    if arguments.interpret:
        interpret(arguments.model, arguments.interpret)
        return
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("triton", "ninetoothed"):
            backend = backend_under_test(name, folder)
            for subject in llama_subjects(arguments.model, folder):
                said = compiled(backend, subject)
                failed += not said.startswith("ok")
                print(f"sm_90 {name:11} {subject.label}: {said}", flush=True)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, "--model", arguments.model, "--interpret", folder],
            env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
        )
        if done.returncode != 0:
            sys.exit(f"the interpreter failed: {done.stderr[-2000:]}")
        for kernel, error in json.loads(done.stdout.splitlines()[-1]).items():
            failed += not error <= 1.0
            print(f"interpreter {kernel}: {error:.2f} of the tolerance", flush=True)
    print(f"{failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
