"""Does the served agent still do what was recorded when the bundle was made, token by token?

Standard library only, Python 3.10. Prompt ids must be equal. Generated tokens must be equal up to
the first one whose recorded margin (best minus second-best logit, nats) is narrow: a near tie may
fall the other way on another processor, and all after it may differ.
"""

import argparse
import http.client
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

try:
    from deployment.jetson.on_device.api_key import ApiKeyError, read_key
    from deployment.jetson.on_device.llama_child import free_port
    from deployment.jetson.on_device.settings import KEY_FILE, installed_root
except ModuleNotFoundError:  # beside this file on the device
    from api_key import ApiKeyError, read_key  # type: ignore[import-not-found,no-redef]
    from llama_child import free_port  # type: ignore[import-not-found,no-redef]
    from settings import KEY_FILE, installed_root  # type: ignore[import-not-found,no-redef]

log = logging.getLogger("smoke")
REQUEST_TIMEOUT_S = 300
_POLL_S = 0.2

Post = Callable[[str, dict], dict]


class SmokeError(ValueError):
    """The agent does not answer as recorded, or not at all."""


def poster(url: str, key: "str | None" = None) -> Post:
    """A function that posts JSON below `url`, with the API key if any, and returns the reply."""
    parts = urlsplit(url)
    # what is asked here is no field use: it must not come back as rows to train on
    headers = {"Content-Type": "application/json", "X-RL-Pipeline-Field-Log": "opt-out"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"

    def post(path: str, body: dict) -> dict:
        connection = http.client.HTTPConnection(
            parts.hostname or "127.0.0.1", parts.port or 80, timeout=REQUEST_TIMEOUT_S
        )
        try:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise SmokeError(f"{url}{path} does not answer: {error}") from None
        finally:
            connection.close()
        if response.status != 200:
            said = raw[:500].decode(errors="replace")
            raise SmokeError(f"{path} answered {response.status}: {said}")
        return json.loads(raw)

    return post


def tokenizer(post: Post, bos_id: "int | None") -> "Callable[[str], list[int]]":
    """Text to ids by the served model; a BOS that the server puts in front is taken off again."""

    def tokenize(text: str) -> "list[int]":
        ids = post("/extras/tokenize", {"input": text})["tokens"]
        return ids[1:] if bos_id is not None and ids[:1] == [bos_id] else ids

    return tokenize


def _first_difference(found: "list[int]", wanted: "list[int]") -> int:
    for index, (a, b) in enumerate(zip(found, wanted, strict=False)):
        if a != b:
            return index
    return min(len(found), len(wanted))


def check_ids(found: "list[int]", wanted: "list[int]", what: str) -> None:
    """Raise where two id sequences differ, naming the first place."""
    if found != wanted:
        at = _first_difference(found, wanted)
        raise SmokeError(
            f"{what}: token {at} is {found[at : at + 1]}, recorded {wanted[at : at + 1]} "
            f"({len(found)} tokens, recorded {len(wanted)})"
        )


def check_turn(text: str, golden: dict, tokenize: Callable, what: str) -> bool:
    """Compare one generated turn; True where all of it was sure, so that the next may be compared.

    `compare` is `tokens`, `text` (the ids are not those of the text), or `prefix` (a near tie).

    Raises:
        SmokeError: a sure token differs.
    """
    if golden["compare"] == "tokens":
        check_ids(tokenize(text), golden["generated_ids"], what)
        return True
    sure, whole = golden["sure_text"], golden["compare"] == "text"
    if text != sure if whole else not text.startswith(sure):
        raise SmokeError(f"{what}: {text!r}, recorded {sure!r}")
    return whole


def check_prompt(index: int, golden: dict, post: Post, tokenize: Callable) -> int:
    """Replay one golden prompt; the number of turns compared in full."""
    for number, turn in enumerate(golden["turns"]):
        what = f"golden prompt {index}, turn {number}, prompt ids"
        check_ids(tokenize(turn["prompt_text"]), turn["prompt_ids"], what)
    reply = post("/v1/chat/completions", {"messages": golden["messages"], "temperature": 0})
    added = reply["rl_pipeline"]["messages"]
    said = [m["content"] for m in added if m["role"] == "assistant"]
    for number, turn in enumerate(golden["turns"]):
        what = f"golden prompt {index}, turn {number}"
        if number >= len(said):
            raise SmokeError(f"{what} was not generated")
        if not check_turn(said[number], turn, tokenize, what):
            return number
    answer = reply["choices"][0]["message"]["content"]
    if answer != golden["answer"]:
        raise SmokeError(
            f"golden prompt {index}: answered {answer!r}, recorded {golden['answer']!r}"
        )
    return len(golden["turns"])


def smoke(golden: dict, post: Post) -> str:
    """Replay all golden prompts; one line that says how much was compared.

    Raises:
        SmokeError: the first difference.
    """
    tokenize = tokenizer(post, golden["added_bos_id"])
    for index, probe in enumerate(golden["tokenizer_probes"]):
        check_ids(tokenize(probe["text"]), probe["ids"], f"tokenizer probe {index}")
    turns = sum(len(prompt["turns"]) for prompt in golden["prompts"])
    full = sum(
        check_prompt(index, prompt, post, tokenize)
        for index, prompt in enumerate(golden["prompts"])
    )
    return (
        f"{len(golden['prompts'])} golden prompts and {len(golden['tokenizer_probes'])} tokenizer "
        f"probes agree; {full} of {turns} turns compared to their last token"
    )


def wait_healthy(
    url: str, deadline_s: float, gave_up: "Callable[[], bool]" = lambda: False
) -> None:
    """Return once `/health` says 200.

    Raises:
        SmokeError: not in time, or `gave_up` says that the server has ended.
    """
    parts, end_s = urlsplit(url), time.monotonic() + deadline_s
    while not gave_up() and time.monotonic() < end_s:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(_POLL_S)
    raise SmokeError(f"{url} was not healthy within {deadline_s:.0f} s")


def start_agent(bundle: Path, python: str, port: int, quant: str) -> subprocess.Popen:
    """Start the bundle's own agent; it ends when our end of its standard input closes."""
    command = [sys.executable, "-S", "-E", "-B", str(bundle / "agent.py"), "--bundle", str(bundle)]
    command += ["--port", str(port), "--python", python, "--quant", quant, "--with-stdin"]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def stop_agent(agent: subprocess.Popen) -> None:
    """Close its standard input and wait."""
    if agent.stdin is not None:
        agent.stdin.close()
    try:
        agent.wait(timeout=15)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


def _key(given: "Path | None", bundle: Path) -> "str | None":
    """The key of the file named, else of the device the bundle is installed on, if it has one."""
    root = installed_root(bundle)
    if given is None and root is not None and (root / KEY_FILE).exists():
        given = root / KEY_FILE
    return None if given is None else read_key(given)


def main(argv: "list[str] | None" = None) -> int:
    """Command line; 0 when everything agrees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--bundle", type=Path, default=here)
    parser.add_argument("--url", help="a running agent; without it, one is started for the test")
    parser.add_argument("--python", default="python3", help="an interpreter that has llama_cpp")
    parser.add_argument(
        "--api-key-file", type=Path, help="what the agent wants; default: the device's, if any"
    )
    parser.add_argument("--deadline", type=float, default=300, help="seconds to become healthy")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="smoke: %(message)s", stream=sys.stderr)
    golden = json.loads((options.bundle / "golden_prompts.json").read_bytes())
    agent, url = None, options.url
    try:
        if url is None:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            agent = start_agent(options.bundle, options.python, port, golden["quant"])
        ended = (lambda: agent.poll() is not None) if agent else (lambda: False)
        wait_healthy(url, options.deadline, ended)
        log.info("%s", smoke(golden, poster(url, _key(options.api_key_file, options.bundle))))
    except (SmokeError, ApiKeyError) as error:
        log.error("FAILED: %s", error)
        return 1
    finally:
        if agent is not None:
            stop_agent(agent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
