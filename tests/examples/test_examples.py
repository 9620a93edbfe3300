"""The examples that tune: a user's own module, and the notebook, each on a machine that was measured before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import report_samples as samples
from nbclient import NotebookClient
from paths import ROOT

from fuseplan.search.store.location import default_path

EXAMPLES = ROOT / "examples"


def test_the_module_is_tuned_compiled_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = samples.known_machine(default_path())
    command = [sys.executable, str(EXAMPLES / "tune_a_module.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert f"stored in {path}" in done.stdout and "forward: " in done.stdout
    assert "0 misses, 0 groups fell back" in done.stdout, done.stdout


def test_the_notebook_runs_and_stores_no_outputs(tmp_path: Path) -> None:
    samples.known_machine(tmp_path / "notebook.db")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()

    def shown(source: str) -> list[str]:
        """What the cell with these words shows, in each of its forms."""
        (cell,) = [cell for cell in code if source in cell.source]
        data = [output["data"] for output in cell.outputs if "data" in output]
        return [str(text) for one in data for text in one.values()]

    for source in ("\ntuned", "\nreport", "\nexplained", "misses=True"):
        assert any(text.lstrip().startswith("<div") for text in shown(source)), source
    assert any("silu+mul 5x128" in text for text in shown("planner.misses(DB"))
    serving = (cell for cell in code if "print(serve())" in cell.source)
    first, again = ("".join(output["text"] for output in cell.outputs) for cell in serving)
    assert "0 misses" not in first and "0 misses" in again, (first, again)
