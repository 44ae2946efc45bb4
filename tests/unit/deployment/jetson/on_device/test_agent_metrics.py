import re
import threading

from deployment.jetson.on_device.metrics import MAX_CODES, Metrics

CHAT = "/v1/chat/completions"
SAMPLE = re.compile(r'^[a-z_]+(\{([a-z]+="[^"\n]*",?)+\})? -?[0-9.e+]+$')


def _values(text):
    """Sample → value; every line must be a comment or a sample."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            assert SAMPLE.match(line), line
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_page_of_an_agent_that_was_never_asked():
    found = _values(Metrics("a" * 64, "Q8_0").render(ready=False))
    assert found[f'rl_pipeline_info{{release="{"a" * 64}",quant="Q8_0"}}'] == 1
    assert found["rl_pipeline_ready"] == 0
    assert found["rl_pipeline_chat_seconds_count"] == 0
    assert found["rl_pipeline_field_rows_total"] == 0


def test_counts_by_hand():
    metrics = Metrics("r", "q")
    for seconds in (0.04, 0.3, 400.0):
        metrics.begin()
        metrics.end(CHAT, 200, seconds)
    metrics.begin()
    metrics.end("/health", 503, 0.001)
    metrics.begin()  # still running
    metrics.error("timeout")
    metrics.count("prompt_tokens", 30)
    metrics.count("prompt_tokens", 12)
    found = _values(metrics.render(ready=True))
    assert found[f'rl_pipeline_requests_total{{path="{CHAT}",status="200"}}'] == 3
    assert found['rl_pipeline_requests_total{path="/health",status="503"}'] == 1
    assert found["rl_pipeline_requests_running"] == 1
    assert found['rl_pipeline_errors_total{code="timeout"}'] == 1
    assert found["rl_pipeline_prompt_tokens_total"] == 42
    bucket = 'rl_pipeline_chat_seconds_bucket{{le="{}"}}'
    assert [found[bucket.format(le)] for le in ("0.05", "0.25", "0.5", "300", "+Inf")] == [
        1, 1, 2, 2, 3,
    ]  # fmt: skip
    assert found["rl_pipeline_chat_seconds_sum"] == 400.34
    assert found["rl_pipeline_chat_seconds_count"] == 3


def test_clients_cannot_make_the_page_grow():
    metrics = Metrics("r", "q")
    for index in range(500):
        metrics.begin()
        metrics.end(f"/made/up/{index}", 404, 0.0)
        metrics.error(f"code_{index}")
    text = metrics.render(ready=True)
    assert 'path="other",status="404"} 500' in text
    assert text.count("rl_pipeline_errors_total{") == MAX_CODES + 1
    assert f'code="other"}} {500 - MAX_CODES}' in text


def test_labels_are_escaped():
    text = Metrics('a"b\\c\nd', "q").render(ready=True)
    assert 'release="a\\"b\\\\c\\nd"' in text


def test_many_threads_lose_nothing():
    metrics = Metrics("r", "q")

    def ask():
        for _ in range(200):
            metrics.begin()
            metrics.end(CHAT, 200, 0.1)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = _values(metrics.render(ready=True))
    assert found["rl_pipeline_chat_seconds_count"] == 1600
    assert found["rl_pipeline_requests_running"] == 0
