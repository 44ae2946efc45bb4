"""Weights written and read back; what is no whole file is named."""

import pytest
import torch

from tasks.models.errors import WeightsMismatchError
from tasks.models.weights_file import read_weights, write_weights


def test_what_is_written_is_read_whatever_its_layout(tmp_path):
    grid = torch.arange(6.0).reshape(2, 3)
    trained = torch.ones(2, requires_grad=True)
    tensors = {"turned": grid.T, "trained": trained, "half": grid.bfloat16(), "none": grid[:0]}
    write_weights(tmp_path / "new" / "w.safetensors", tensors)
    found = read_weights(tmp_path / "new" / "w.safetensors")
    assert sorted(found) == sorted(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("left", [0, 7, 8, 60, -1])
def test_a_file_that_is_cut_off_is_named(tmp_path, left):
    file = tmp_path / "w.safetensors"
    write_weights(file, {"a": torch.ones(4)})
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(WeightsMismatchError, match=f"{file} is not a whole .*; resume: the"):
        read_weights(file)


@pytest.mark.parametrize(
    "content", [None, b"x" * 100, b"\xff" * 8 + b"{}", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_what_is_no_such_file_is_named_with_the_remedy_given(tmp_path, content):
    file = tmp_path / "w.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(WeightsMismatchError, match="never finished; ask again"):
        read_weights(file, "ask again")
    with pytest.raises(WeightsMismatchError, match=str(tmp_path)):
        read_weights(tmp_path)
