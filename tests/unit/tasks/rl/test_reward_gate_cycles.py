"""The reward gate beside the loop: verdicts on their own data, the rule that stops, resuming."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from configs.schema.rl import RewardGateConfig, RLConfig
from tasks.artifacts.append_log import read_log
from tasks.rl.errors import RewardGateError
from tasks.rl.reward_gate import FILE_NAME, RewardGate, reward_limits

GOOD, FLAT = [1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]
NAMES = ["a", "b", "c", "d"]


def config(**gate: object) -> RLConfig:
    return RLConfig(batch_size=4, group_size=2, reward_gate=RewardGateConfig(**gate))


def gate(folder: Path, **rule: object) -> RewardGate:
    return RewardGate(config(**rule), folder)


def lines(folder: Path) -> list[dict]:
    return list(read_log(folder / FILE_NAME).rows)


def test_a_cycle_is_judged_and_written_down(tmp_path: Path) -> None:
    guard = gate(tmp_path)
    guard.submit(1, GOOD, NAMES)
    metrics = guard.settle()
    guard.close()
    assert metrics == {"reward_gate_passed": 1.0, "reward_gate_failed_checks": 0.0}
    (line,) = lines(tmp_path)
    assert (line["step"], line["passed"], line["rows"], line["scored"]) == (1, True, 4, 4)
    # sample deviation of 1, 0, 1, 0 is sqrt(4 * 0.25 / 3)
    assert line["observed"]["variance"] == pytest.approx(0.5773502691896258)
    assert line["observed"]["saturated_at_floor"] == 0.5
    assert guard.summary() == {"cycles": 1, "failed": 0, "codes": {}}


@pytest.mark.parametrize(
    ("outcomes", "rule", "codes"),
    [
        (FLAT, {}, ["variance", "saturated_at_floor"]),
        ([1.0] * 4, {}, ["variance", "saturated_at_ceiling"]),
        ([1.0, 0.0, None, None], {}, ["missing"]),
        ([1.0, 0.0, 1.0, None], {"max_missing_share": 0.25}, []),
        (GOOD, {"min_mean": 0.6}, ["mean"]),
        (GOOD, {"max_mean": 0.4}, ["mean"]),
        (GOOD, {"min_mean": 0.5, "max_mean": 0.5}, []),
        ([1.0, 0.0], {}, ["row_count"]),
        ([], {}, ["row_count"]),
        ([None] * 4, {"max_missing_share": 1.0, "min_std": 0.0}, ["saturated_at_floor"]),
        (FLAT, {"min_std": 0.0, "max_saturated_share": 1.0}, []),
    ],
)
def test_what_fails(tmp_path: Path, outcomes: list, rule: dict, codes: list[str]) -> None:
    guard = gate(tmp_path, **rule)
    guard.submit(7, outcomes, NAMES[: len(outcomes)])
    guard.settle()
    guard.close()
    (line,) = lines(tmp_path)
    assert set(codes) <= set(line["failed"])
    assert line["passed"] is (codes == [])
    if codes:
        assert guard.summary()["failed"] == 1 and codes[0] in line["why"]


def test_the_rule_stops_after_failures_in_a_row_and_a_pass_starts_the_count_anew(
    tmp_path: Path,
) -> None:
    guard = gate(tmp_path, stop_after=2)
    for step, outcomes in enumerate([FLAT, GOOD, FLAT], start=1):
        guard.submit(step, outcomes, NAMES)
        guard.settle()
        guard.enforce()
    guard.submit(4, FLAT, NAMES)
    guard.settle()
    with pytest.raises(
        RewardGateError, match="2 cycles in a row, up to step 4: variance"
    ) as caught:
        guard.enforce()
    guard.close()
    assert FILE_NAME in str(caught.value) and "rl.reward_gate.stop_after" in str(caught.value)
    assert guard.summary() == {
        "cycles": 4, "failed": 3, "codes": {"saturated_at_floor": 3, "variance": 3},
    }  # fmt: skip


def test_without_a_rule_it_goes_on(tmp_path: Path) -> None:
    guard = gate(tmp_path)
    for step in range(1, 4):
        guard.submit(step, FLAT, NAMES)
    guard.settle()
    guard.enforce()
    guard.close()
    assert guard.failed_in_a_row == 3
    assert guard.settle() == {}


def test_a_resumed_run_goes_on_from_the_verdicts_of_its_checkpoint(tmp_path: Path) -> None:
    first = gate(tmp_path)
    for step in range(1, 5):
        first.submit(step, FLAT if step > 1 else GOOD, NAMES)
    first.settle()
    first.close()
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b'{"step": 5, "pas')  # killed there
    second = gate(tmp_path, stop_after=3)
    second.resume(3)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert second.failed_in_a_row == 2
    second.submit(4, FLAT, NAMES)
    second.settle()
    with pytest.raises(RewardGateError):
        second.enforce()
    second.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


def test_a_fresh_run_forgets_what_lies_there(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps({"step": 1, "passed": False}) + "\n")
    guard = gate(tmp_path)
    guard.resume(0)
    guard.close()
    assert (lines(tmp_path), guard.failed_in_a_row) == ([], 0)


def test_four_gates_at_once_judge_their_own_batches(tmp_path: Path) -> None:
    """Each batch has its own mean; a verdict on another thread's data would show another one."""

    def play(number: int) -> list[float]:
        folder = tmp_path / str(number)
        folder.mkdir()
        guard = RewardGate(
            RLConfig(
                batch_size=8, group_size=2, reward_gate=RewardGateConfig(min_mean=0.0, min_std=0)
            ),
            folder,
        )
        for step in range(1, 9):
            right = (number + step) % 9
            guard.submit(step, [1.0] * right + [0.0] * (8 - right), list("abcdefgh"))
        guard.settle()
        guard.close()
        return [line["observed"]["mean"] for line in lines(folder)]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(play, range(4)))
    assert found == [[(n + step) % 9 / 8 for step in range(1, 9)] for n in range(4)]


def test_the_bounds_come_from_the_config() -> None:
    limits = reward_limits(config(min_mean=0.1, max_saturated_share=0.7))
    assert (limits.min_rows, limits.min_mean, limits.max_mean) == (4, 0.1, None)
    assert (limits.floor, limits.ceiling, limits.max_saturated_share) == (0.0, 1.0, 0.7)
    with pytest.raises(ValueError, match="no batch could pass"):
        RewardGateConfig(min_mean=0.5, max_mean=0.4)
