"""Addresses and shares of GPUs that no cluster could have are refused with what to write."""

import pytest
from pydantic import TypeAdapter, ValidationError

from configs.schema.rl import RLConfig
from configs.schema.rl_runtimes import InlineRuntime, RayRuntime, Runtime


@pytest.mark.parametrize(
    "address", [None, "auto", "10.0.0.1:6379", "head.cluster.local:1", "[fd00::1]:65535"]
)
def test_addresses_of_a_cluster(address):
    assert RayRuntime(address=address).address == address


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        ":6379",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "ray://10.0.0.1:10001",
        "",
        "a:b",
        "a:-1",
        "a b:6379",
        "head:6379 ",
        " head:6379",
        "head:６３７９",
        "::1:6379",
        "[::1:6379",
        "[head]:6379",
        "head/x:1",
    ],
)
def test_what_is_no_address_names_the_key_and_a_way_out(address):
    with pytest.raises(ValidationError, match=r"rl\.runtime\.address=.*ray start --head"):
        RayRuntime(address=address)


@pytest.mark.parametrize("gpus", [0, 0.25, 0.5, 1, 2, 8])
def test_whole_gpus_or_a_share_of_one(gpus):
    runtime = RayRuntime(gpus_per_rollout=gpus, gpus_per_learner=gpus)
    assert (runtime.gpus_per_rollout, runtime.gpus_per_learner) == (gpus, gpus)


@pytest.mark.parametrize("key", ["gpus_per_rollout", "gpus_per_learner"])
def test_one_and_a_half_gpus_is_nothing(key):
    with pytest.raises(ValidationError, match=rf"rl\.runtime\.{key}=1\.5 .* try 1"):
        RayRuntime(**{key: 1.5})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout_workers", 0), ("learner_ranks", 0), ("grader_workers", -1),
        ("gpus_per_rollout", -0.5), ("max_worker_losses", -1), ("placement", "strict_pack"),
    ],
)  # fmt: skip
def test_out_of_range(key, value):
    with pytest.raises(ValidationError, match=key):
        RayRuntime(**{key: value})


def test_the_type_chooses_the_settings():
    choose = TypeAdapter(Runtime).validate_python
    assert choose({"type": "inline"}) == InlineRuntime()
    assert choose({"type": "ray", "learner_ranks": 2}) == RayRuntime(learner_ranks=2)


def test_a_stall_is_told_before_it_ends_the_run():
    assert RLConfig(stall_after_s=5, stall_abort_s=5).stall_abort_s == 5
    with pytest.raises(ValidationError, match=r"rl\.stall_abort_s=4 is below .*=5"):
        RLConfig(stall_after_s=5, stall_abort_s=4)
