"""The examples that tune: a user's own module, and the notebook, where calls are counted and not timed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import nbformat
import pytest
import report_samples as samples
from fast_tunes import count_instead_of_timing
from nbclient import NotebookClient
from paths import ROOT, SUPPORT

from fuseplan.search.store.location import default_path

EXAMPLES = ROOT / "examples"
#: What the notebook's process does first.
COUNT = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import fast_tunes, pytest
fast_tunes.count_instead_of_timing(pytest.MonkeyPatch())
"""


def test_the_module_is_tuned_compiled_and_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = samples.known_machine(default_path())
    monkeypatch.setattr(sys, "argv", ["tune_a_module.py"])
    count_instead_of_timing(monkeypatch)
    runpy.run_path(str(EXAMPLES / "tune_a_module.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert f"stored in {path}" in printed and "forward: " in printed
    assert "0 misses, 0 groups, regions, graphs or calls fell back" in printed, printed


def test_the_notebook_runs_and_stores_no_outputs(tmp_path: Path) -> None:
    samples.known_machine(tmp_path / "notebook.db")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(COUNT))
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()

    def shown(source: str) -> list[str]:
        """What the cell with these words shows, in each of its forms."""
        (cell,) = [cell for cell in code if source in cell.source]
        data = [output["data"] for output in cell.outputs if "data" in output]
        return [str(text) for one in data for text in one.values()]

    for source in ("\ntuned", "\nreport", "\nexplained", "misses=True"):
        assert any(text.lstrip().startswith("<div") for text in shown(source)), source
    assert any("silu+mul 5x128" in text for text in shown("fuseplan.misses(DB"))
    serving = (cell for cell in code if "print(serve())" in cell.source)
    first, again = ("".join(output["text"] for output in cell.outputs) for cell in serving)
    assert "0 misses" not in first and "0 misses" in again, (first, again)
