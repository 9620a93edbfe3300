"""Table and plot of a device spec."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys

import pytest
from costmodel_samples import CPU, GPU

from fuseplan.costmodel.device import LinearFit
from fuseplan.costmodel.device_report import bandwidth_figure, format_bytes, spec_table


def test_table_lists_every_number() -> None:
    spec = dataclasses.replace(CPU, fits={"memory": LinearFit(1.5, None, 0.125, 3), "eager": LinearFit(1, 2, 0, 4)})
    table = spec_table(spec).set_index("quantity")
    assert table.loc["launch, eager", "typical"] == 2.0
    assert table.loc["launch, eager", "best"] == 1.5
    assert table.loc["bandwidth at 976.6 KiB", "typical"] == 200.0  # 1e6 / 1024
    assert table.loc["bandwidth of one thread at 3.815 MiB", "typical"] == 30.0  # 4e6 / 2 ** 20
    assert table.loc["peak sfu", "typical"] == 10.0  # 1e10 / s
    assert table.loc["fit memory", "detail"] == "flat, residual 12.5%, 3 sizes"
    assert table.loc["fit eager", "detail"] == "2 GB/s, residual 0.0%, 4 sizes"
    assert len(table) == 2 + 2 + 2 + 2 + 2 + 1  # launches, bandwidth, one thread, peaks, fits, noise


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (60 * 2**20, "60 MiB"), (2**30, "1 GiB")]
)
def test_bytes_are_readable(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(("spec", "lines"), [(CPU, 4), (GPU, 3)])
def test_figure_draws_the_measured_points(spec, lines: int) -> None:
    figure = bandwidth_figure(spec)
    (axes,) = figure.axes
    typical, ideal = axes.get_lines()[:2]
    assert list(typical.get_xdata()) == [1e6, 4e6]
    assert list(typical.get_ydata()) == [200.0, 50.0]
    assert list(ideal.get_ydata()) == pytest.approx([250.0, 60.0])
    assert len(axes.get_lines()) == lines  # typical, ideal, cache, and one thread on CPUs
    image = io.BytesIO()
    figure.savefig(image, format="svg")
    assert b"bandwidth" in image.getvalue() or image.getvalue().startswith(b"<?xml")


def test_importing_the_cost_model_loads_no_plotting_and_no_optimiser() -> None:
    code = (
        "import sys, fuseplan.costmodel.device_report, fuseplan.costmodel.probe.probe, fuseplan.costmodel.roofline, "
        "fuseplan.costmodel.calibrate; print([m for m in ('matplotlib', 'scipy.optimize') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
