"""Ctrl-C while ``torch.compile`` waits for C++ compilers that never end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compilers import find_compiler
from paths import ROOT

from fuseplan.kernels.native.build import COMPILER_NAMES, is_sound

#: Compiles, is interrupted, and compiles again.
SCRIPT = """
import sys, torch, fuseplan.planner
from pathlib import Path
def f(x):
    return (torch.cos(x) * 3 + 1).sum(-1), torch.softmax(torch.sin(x) * 2, -1), (x @ x.T).relu() * 2
x = torch.linspace(-1, 1, 81).view(9, 9)
fast = torch.compile(f, backend="fuseplan", options={"db": sys.argv[1], "on_miss": sys.argv[2]})
with torch.no_grad():
    try:
        fast(x)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.stdin.readline()
        fuseplan.planner.reset_stats()
        torch.testing.assert_close(fast(x), f(x))
        done = fuseplan.planner.stats()
        print(done.groups_fused, dict(done.fallbacks), flush=True)
"""


def ended(pid: int) -> bool:
    """Wait for the end of a process."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 60)[0])
    finally:
        os.close(handle)


def test_an_interrupt_ends_compilers_and_the_next_compile_works(tmp_path: Path) -> None:
    real = find_compiler()
    if real is None:
        pytest.skip("no C++ compiler")
    tools, pids, cache = tmp_path / "tools", tmp_path / "pids", tmp_path / "cache"
    tools.mkdir()
    pids.mkdir()
    for name in COMPILER_NAMES:  # what tries a compiler out works; kernels never end while there is a folder "pids"
        tool = tools / name
        tool.write_text(
            f'#!/bin/sh\nif [ -d {pids} ]; then case "$*" in *--version*|*probe*) ;;\n'
            f'*) echo > {pids}/$$; exec sleep 1000;; esac; fi\nexec {real.path} "$@"\n'
        )
        tool.chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:/usr/bin:/bin", "XDG_CACHE_HOME": str(cache)}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "t.db"), "model"], cwd=ROOT, env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            while not [*pids.iterdir()] and process.poll() is None:
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGINT)  # to it alone, not to the compilers
            assert process.stdout.readline() == "interrupted\n"
            assert all(ended(int(path.name)) for path in pids.iterdir())
            left = [path for path in cache.rglob("*") if path.is_file() and "cpp" in path.parts]
            assert all(path.suffix == ".so" and is_sound(path) for path in left), left
            pids.rename(tmp_path / "no longer")
            result, _ = process.communicate("\n", timeout=500)
            fused, fallbacks = result.split(" ", 1)
            assert int(fused) > 0 and fallbacks == "{}\n" and process.returncode == 0
        finally:
            process.kill()
