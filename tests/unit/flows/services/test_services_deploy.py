"""What is deployed: the committed files, the schedule a person set, a version by content."""

import yaml
from prefect.utilities.callables import parameter_schema

from flows.pipeline import rl_pipeline
from flows.services.deploy import (
    deployment_file,
    describe,
    kept_schedules,
    read_automations,
)

DESCRIBED = [
    {"slug": "nightly", "cron": "30 2 * * *", "timezone": "Europe/Berlin", "active": False}
]


def test_a_schedule_that_was_changed_on_the_server_is_kept():
    assert kept_schedules(DESCRIBED, []) == DESCRIBED
    there = {"slug": "nightly", "cron": "0 4 * * *", "timezone": "Asia/Tokyo", "active": True}
    unknown = {"slug": None, "cron": "* * * * *", "active": True}
    assert kept_schedules(DESCRIBED, [unknown, there]) == [there]
    with_parameters = {**DESCRIBED[0], "parameters": {"nightly": True}}
    assert kept_schedules([with_parameters], [there])[0]["parameters"] == {"nightly": True}


def test_the_version_follows_what_is_deployed(monkeypatch):
    def versions(existing):
        return {d["name"]: d["version"] for d in describe(existing)["deployments"]}

    first = versions({})
    assert first == versions({}) and {len(v) for v in first.values()} == {16}
    changed = versions({"rl-pipeline": [{**DESCRIBED[0], "active": True}]})
    differing = {name for name in first if first[name] != changed[name]}
    assert differing == {"rl-pipeline"}
    monkeypatch.setattr("configs.load.profiles", lambda: {"another": None})
    assert versions({})["rl-pipeline"] != first["rl-pipeline"]


def test_flow_and_deployment_share_the_name_and_a_module_is_the_entrypoint():
    deployments = {
        d["name"]: d for d in yaml.safe_load(deployment_file().read_text())["deployments"]
    }
    deployment = deployments["rl-pipeline"]
    assert rl_pipeline.name == "rl-pipeline"
    assert (
        deployment["entrypoint"] == "flows.pipeline.rl_pipeline"
    )  # a file puts flows/ on sys.path
    (nightly,) = deployment["schedules"]
    assert nightly["active"] is False and nightly["parameters"] == {"nightly": True}
    assert nightly["timezone"] == "Europe/Berlin"
    for each in deployments.values():
        assert each["work_pool"]["name"] == "rl-pipeline"
        assert "concurrency_limit" not in each  # the pool has it: a lost lease crashes no run


def test_automations_are_read_and_wait_for_more_than_three_heartbeats():
    from flows.services.specs import HEARTBEAT_S

    (silence,) = read_automations()
    assert silence.trigger.within.total_seconds() >= 3 * HEARTBEAT_S
    assert "prefect.flow-run.Completed" in silence.trigger.expect


def test_parameters_are_a_form_with_choices_and_descriptions():
    from configs.load import profiles
    from tasks.stages import STAGES

    schema = parameter_schema(rl_pipeline).model_dump()["properties"]
    assert {"profile", "overrides", "force", "stop_after"} <= set(schema)
    assert all(each.get("description") for each in schema.values())
    named, file = schema["profile"]["anyOf"]
    assert named["enum"] == sorted(profiles()) and "micro" in named["enum"]
    assert file["pattern"] == r"\.(ya?ml|json)$"
    choices = [option for option in schema["stop_after"]["anyOf"] if "enum" in option]
    assert [option["enum"] for option in choices] == [list(STAGES)]
    lists = [option for option in schema["force"]["anyOf"] if option["type"] == "array"]
    assert lists[0]["items"]["enum"] == list(STAGES)
