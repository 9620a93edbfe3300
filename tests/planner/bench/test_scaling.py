"""The scaling table: what is planned is complete and repeats are planned once (times are not tested)."""

from __future__ import annotations

from reference_backend import ReferenceBackend
from step_programs import CPU, NothingStored
from synthetic_decoders import plan_scaling, transformer_graph

from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.ops.table import kind_of, written_value
from fuseplan.planner.tuning.planner import Planner


def test_table_counts_what_was_planned() -> None:
    table = plan_scaling(lambda: Planner(NothingStored(), None, "test", CPU, (ReferenceBackend(),)), (60, 1200))
    assert list(table["ops"]) == [60, 1200]
    for row in table.to_dict("records"):
        regions = find_regions(transformer_graph(int(row["ops"])))
        assert row["regions"] == len(regions)
        assert row["unique_regions"] == len({region.key for region in regions})
        assert row["total_s"] == row["build_s"] + row["regions_s"] + row["plan_s"]
    large = table.iloc[1]
    assert large["unique_regions"] < large["regions"] / 2
    assert large["groups"] >= large["regions"] * 0.9, "on a device where launches cost, regions fuse"


def test_the_decoder_has_every_kind_of_op_that_decoders_have() -> None:
    graph = transformer_graph(400)
    assert {kind_of(node, graph.specs) for node in graph} == {"view", "compute", "anchor"}
    assert any(written_value(node) is not None for node in graph)
    assert any(not values for _, _, values in graph.graph.edges(data="values")), "cache updates are ordered"
