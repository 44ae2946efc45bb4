"""The order in which a report names quantisations."""

from flows.report.data import RunFiles, quantised
from tasks.artifacts import write_json


def test_a_repaired_file_stands_behind_the_type_it_comes_from(tmp_path):
    names = ["IQ2_M+12", "NEW", "Q8_0", "IQ2_M", "F16", "Q4_K_M+2", "Q4_K_M"]
    write_json(tmp_path / "summary.json", {"quant": {name: {"ships": True} for name in names}})
    found = list(quantised(RunFiles(tmp_path)))
    assert found == ["F16", "Q8_0", "Q4_K_M", "Q4_K_M+2", "IQ2_M", "IQ2_M+12", "NEW"]
