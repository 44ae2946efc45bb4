"""Lineage read from a real store, ledger, devices and bundle, asked for in every way there is."""

import json
import shutil
import tarfile

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.lineage.graph import LineageQueryError
from flows.lineage.page import render
from flows.lineage.query import resolve
from flows.lineage.show import as_json, missing
from flows.lineage.sources import fill_from_mlflow, gather
from tasks.artifacts import ArtifactRecord, hash_file, write_json, write_jsonl
from tasks.artifacts.store import StageFolder
from tasks.tracking.operations import Speaker, create_run, set_tags
from tasks.tracking.promotion_ledger import PromotionLedger, Release

HOSTILE = "<script>alert(1)</script>\u202e"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """data → sft → quantize → package, one run, one promoted release, one device."""
    monkeypatch.chdir(tmp_path)
    return build(tmp_path)


def fill_data(path):
    write_jsonl(path / "train.jsonl", [{"id": "row-1", "prompt": HOSTILE, "band": "easy"}])
    write_jsonl(
        path / "quarantine.jsonl",
        [{"row_id": "row-9", "reason": "leak: held-out", "row": {"prompt": "9"}}],
    )
    write_jsonl(path / "demonstrations.jsonl", [{"id": "row-1-0", "row_id": "row-1"}] * 3)


def fill_rl(path):
    steps = [{"step": s, "row_ids": ["row-1"] if s % 2 else ["row-2"]} for s in range(1, 5)]
    write_jsonl(path / "trained_rows.jsonl", steps)


def fill_quantize(path):
    (path / "Q8_0.gguf").write_bytes(b"gguf")


def promote(root, records):
    """One run that left `records`, and its bundle as the champion on one device."""
    run = root / "runs" / "20260101-000000-micro-abcd"
    write_json(run / "records.json", {n: r.model_dump(mode="json") for n, r in records.items()})
    bundle = records["package"]
    ledger = PromotionLedger(root / "runs", "micro")
    release = Release(
        model="micro",
        profile="micro",
        run_id=run.name,
        bundle_sha256=bundle.sha256,
        bundle=f"{bundle.uri}/bundle",
        records=records,
    )
    ledger.append("promote", release, reason="first")
    write_json(root / "runs" / "devices" / "jetson-1.json", {"release": bundle.sha256, "time": 0})


def build(root):
    store = root / "runs" / "store"
    source = root / "prompts.jsonl"
    source.write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    records = {}

    def stage(name, kind, letter, inputs, fill, config=None, files=None, meta=None):
        folder = StageFolder(store, name, letter * 64)
        folder.control.mkdir(parents=True)
        sha256 = fill(folder.path) or letter * 64
        record = ArtifactRecord(kind=kind, uri=str(folder.path), sha256=sha256, meta=meta or {})
        parts = {"inputs": {n: records[n].sha256 for n in inputs}, "config": config or {}}
        write_json(folder.control / "key.json", {**parts, "files": files or {}, "code": {"a": "b"}})
        folder.finish(record, wall_s=1.0)
        records[name] = record

    def package(path):
        entry = {"sha256": hash_file(store / "quantize" / ("c" * 16) / "Q8_0.gguf")}
        manifest = {
            "format": 1,
            "models": {"Q8_0": entry},
            "files": {"a": {"sha256": "0" * 64, "size": 1}},
            "lineage": {"rl": "b" * 64},
        }
        return hash_file(write_json(path / "bundle" / "manifest.json", manifest))

    stage(
        "data",
        "dataset",
        "a",
        (),
        fill_data,
        {"data.source.train": str(source), "data.source.type": "file"},
        {"data.source.train": hash_file(source)},
        {"train_rows": 1},
    )
    stage("rl", "model", "b", ("data",), fill_rl)
    stage("quantize", "quantisations", "c", ("data", "rl"), fill_quantize)
    stage("package", "bundle", "d", ("quantize", "rl"), package, meta={"archive_sha256": "9" * 64})
    promote(root, records)
    return root / "runs"


def titles(nodes):
    return {n.title for n in nodes}


def bundle_sha(runs):
    return hash_file(next(runs.glob("store/package/*/bundle/manifest.json")))


def test_from_the_device_to_the_prompt_file_and_back(runs):
    graph = gather(runs)
    device = graph.find("jetson-1")
    up = graph.ancestors(device.key)
    assert titles(up) == {"bundle", "Q8_0.gguf", "quantisations", "policy", "data", "prompts.jsonl"}
    assert not missing(graph, device)
    source = resolve(graph, runs, "prompts.jsonl")
    assert source.kind == "source" and source.found
    assert device.key in {n.key for n in graph.descendants(source.key)}


def test_every_way_to_ask_for_the_bundle(runs, tmp_path):
    sha = bundle_sha(runs)
    folder = next(runs.glob("store/package/*"))
    archive = tmp_path / "agent.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder / "bundle", "agent-1")
    asked = [sha, sha[:8], "9" * 64, str(folder), str(folder / "bundle"), str(archive)]
    asked += [str(next(runs.glob("2026*"))), "20260101-000000-micro-abcd"]
    for query in asked:
        assert resolve(gather(runs), runs, query).sha256 == sha, query
    for query in ("champion", "micro/1", "micro/champion"):
        assert resolve(gather(runs), runs, query).key == "model:micro/1"


def test_a_row_says_where_it_lies_what_it_taught_and_reaches_the_device(runs):
    graph = gather(runs)
    row = resolve(graph, runs, "row-1")
    assert row.where.endswith("train.jsonl:1") and row.facts["demonstrations"] == "3"
    assert row.facts["trained on in RL at step"] == "1, 3"
    assert titles(graph.parents(row.key)) == {"prompts.jsonl"}
    assert "device:jetson-1" in {n.key for n in graph.descendants(row.key)}


def test_a_quarantined_row_says_why_and_went_nowhere(runs):
    graph = gather(runs)
    row = resolve(graph, runs, "row-9")
    assert row.facts["quarantined"] == "leak: held-out" and graph.descendants(row.key) == []


def test_a_file_inside_an_output_is_found_by_its_hash(runs):
    path = next(runs.glob("store/data/*/demonstrations.jsonl"))
    node = resolve(gather(runs), runs, hash_file(path)[:10])
    assert node.kind == "file" and node.title == "demonstrations.jsonl"


def test_what_is_gone_is_named_and_mlflow_says_what_it_was_made_from(runs):
    shutil.rmtree(next(runs.glob("store/rl/*")))
    graph = gather(runs)
    bundle = resolve(graph, runs, bundle_sha(runs))
    assert titles(missing(graph, bundle)) == {"policy"}
    speaker = Speaker(f"sqlite:///{runs / 'mlflow.db'}", "any", None)
    tags = {"output.sha256": "b" * 64, "input.data.sha256": "e" * 64, "stage": "rl"}
    speaker.say(create_run("rl", "rl", None, tags))
    speaker.say(set_tags("rl", {"output.uri": "runs/store/rl/bb"}))
    assert fill_from_mlflow(graph, speaker) == 1
    policy = graph.node("b" * 64)
    assert not policy.found and policy.facts["was in"] == "runs/store/rl/bb"
    assert graph.node("e" * 64).found is False and "e" * 64 in {
        n.key for n in graph.parents(policy.key)
    }


def test_a_bundle_from_elsewhere_names_what_is_not_here(runs, tmp_path):
    manifest = json.loads(next(runs.glob("store/package/*/bundle/manifest.json")).read_bytes())
    manifest["lineage"] = {"data": "a" * 64, "rl": "f" * 64}
    write_json(tmp_path / "other" / "manifest.json", manifest)
    graph = gather(runs)
    node = resolve(graph, runs, str(tmp_path / "other"))
    assert titles(missing(graph, node)) == {"rl"} and "a" * 64 in {
        p.key for p in graph.parents(node.key)
    }


@pytest.mark.parametrize("query", ["nope", "", "row-1' OR 1", "../../etc/passwd", "ffffff"])
def test_a_question_about_nothing_is_an_error_that_teaches(runs, query):
    with pytest.raises(LineageQueryError, match="data row"):
        resolve(gather(runs), runs, query)


def test_an_archive_that_is_none_and_one_without_manifest(runs, tmp_path):
    (tmp_path / "x.tar.gz").write_bytes(b"not gzip")
    with pytest.raises(LineageQueryError, match="cannot be read"):
        resolve(gather(runs), runs, str(tmp_path / "x.tar.gz"))
    with tarfile.open(tmp_path / "y.tar.gz", "w:gz"):
        pass
    with pytest.raises(LineageQueryError, match=r"no manifest\.json"):
        resolve(gather(runs), runs, str(tmp_path / "y.tar.gz"))


def test_an_empty_runs_folder_is_an_empty_graph(tmp_path):
    assert len(gather(tmp_path / "nothing")) == 0


def test_the_page_holds_no_script_no_address_and_every_node(runs):
    graph = gather(runs)
    page = render(graph, resolve(graph, runs, "row-1"))
    assert (
        "<script" not in page
        and "\u202e" not in page
        and "http" not in page.replace("http-equiv", "")
    )
    assert "&lt;script&gt;" in page
    for node in graph.around("row:row-1").nodes():
        assert node.title in page


def test_the_command_prints_a_tree_json_and_a_page(runs, tmp_path):
    call = CliRunner().invoke
    shown = call(
        app, ["lineage", "jetson-1", "--runs", str(runs), "--html", str(tmp_path / "l.html")]
    )
    assert shown.exit_code == 0 and "prompts.jsonl" in shown.output and "made from" in shown.output
    assert (tmp_path / "l.html").is_file()
    body = json.loads(call(app, ["lineage", "jetson-1", "--runs", str(runs), "--json"]).output)
    assert body["asked"] == "device:jetson-1" and body["missing"] == []
    assert as_json(gather(runs), gather(runs).find("jetson-1"))["nodes"] == body["nodes"]
    assert call(app, ["lineage", "nope", "--runs", str(runs)]).exit_code == 2
