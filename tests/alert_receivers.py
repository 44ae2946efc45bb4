"""Receivers that tests send to for real: a mail server, a webhook, and Slack behind a proxy."""

import contextlib
import http.server
import json
import socket
import ssl
import subprocess
import threading
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hook: Webhook = self.server.hook  # type: ignore[attr-defined]
        hook.received.append((self.path, json.loads(body)))
        if "hang" in self.path:
            hook.let_go.wait(30)
        code = int(self.path[-3:]) if self.path[-3:].isdigit() else 200
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the sender gave us up
            self.send_response(code)
            self.end_headers()
            self.wfile.write(b"ok")

    def do_CONNECT(self) -> None:
        """Answer in place of the host asked for: a TLS server of our own inside the tunnel."""
        hook: Webhook = self.server.hook  # type: ignore[attr-defined]
        hook.tunnels.append(self.path)
        self.send_response(200)
        self.end_headers()
        assert hook.tls is not None
        with hook.tls.wrap_socket(self.connection, server_side=True) as inside:
            _Inside(inside, self.client_address, self.server)
        self.close_connection = True

    def log_message(self, *args: Any) -> None:
        """Nothing on the terminal."""


class _Inside(_Handler):
    def setup(self) -> None:
        self.timeout = 5
        super().setup()


@dataclass
class Webhook:
    """An HTTP server; `/…500` answers with that status, `/hang` only when let go."""

    certificate: Path | None = None
    received: list[tuple[str, Any]] = field(default_factory=list)
    tunnels: list[str] = field(default_factory=list)
    let_go: threading.Event = field(default_factory=threading.Event)
    tls: ssl.SSLContext | None = None

    def __enter__(self) -> "Webhook":
        if self.certificate is not None:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(self.certificate)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hook = self  # type: ignore[attr-defined]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def url(self, path: str = "hook") -> str:
        return f"json://127.0.0.1:{self.port}/{path}"

    def __exit__(self, *exc: object) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._server.server_close()


class Mailbox:
    """A mail server that keeps what it is sent."""

    def __init__(self) -> None:
        self.messages: list[EmailMessage] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.messages.append(message_from_bytes(envelope.content, policy=policy.default))
        return "250 taken"

    def __enter__(self) -> "Mailbox":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._controller = Controller(self, hostname="127.0.0.1", port=self.port)
        self._controller.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._controller.stop()

    @property
    def url(self) -> str:
        return f"mailto://127.0.0.1:{self.port}/?from=pipeline@example.org&to=ops@example.org"


def self_signed(folder: Path) -> Path:
    """A certificate with its key in one file."""
    path = folder / "slack.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=hooks.slack.com", "-keyout", path.with_suffix(".key"), "-out", path],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    path.write_bytes(path.with_suffix(".key").read_bytes() + path.read_bytes())
    return path
