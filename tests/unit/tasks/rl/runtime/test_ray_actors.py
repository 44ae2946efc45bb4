"""Which network interface ranks talk over."""

import pytest

from tasks.rl.errors import EngineUnavailableError
from tasks.rl.runtime.ray_actors import interface_of


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"


def test_an_address_no_interface_has_is_named_with_what_there_is():
    with pytest.raises(EngineUnavailableError, match=r"198\.51\.100\.7.* lo.*--node-ip-address"):
        interface_of("198.51.100.7")
