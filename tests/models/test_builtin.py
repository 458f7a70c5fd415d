from __future__ import annotations

import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import BUILTIN, Network, TIRWorkload, load_workload


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_builtin_networks_load_by_name(name):
    network = load_workload(name)
    assert isinstance(network, Network)
    assert network.name == name
    assert [value.shape for value in network.random_inputs()] == list(network.input_shapes.values())


@pytest.mark.parametrize("name", ["C2D", "GMM", "SFM"])
def test_operators_load_by_name(name):
    workload = load_workload(f"te:{name}")
    assert isinstance(workload, TIRWorkload)
    assert [variable.name_hint for variable in workload.mod.get_global_vars()] == ["main"]


@pytest.mark.parametrize("name", ["resnet19", "te:", "te:nothing", "C2D", ""])
def test_unknown_names_list_the_known_ones(name):
    with pytest.raises(InvalidOptionError, match=r"one of resnet18, .*te:C2D.*te:GMM") as caught:
        load_workload(name)
    assert repr(name) in str(caught.value)
