"""What the agent was asked in the field and what it said: off unless enabled, bounded, private.

Standard library only, Python 3.10. A folder (mode 0700) of numbered files (mode 0600),
`NAME-000001.jsonl` and on; when the newest is full the oldest goes, so that all of them together
never hold more than `max_bytes` and `max_rows`. One JSON line a request:

    {"time": 1760000000.5,       seconds since 1970
     "messages": [...] | null,   as the client sent them
     "answer": "..." | null,     the text, or the tool calls as JSON text; null for an error
     "latency_s": 0.41,
     "error": null | "timeout",  the agent's error code
     "release": "<sha256>",      of the manifest of what was served
     "opted_in": true,           the client, or the owner's settings, allow it to be collected
     "cut": false}               true where the texts were too long and were left out

Without opting in, a row has no texts (they are null) unless the owner sets `keep_private_text`;
only rows with `opted_in: true` are ever collected. A client says its wish in the header
`X-RL-Pipeline-Field-Log: opt-in` or `opt-out`; without it the owner's `opt_in` holds. Readers skip
a line that is not whole: it is the last one of a file, written when the power went.
"""

import errno
import json
import logging
import os
import re
import stat
import threading
from pathlib import Path

HEADER = "X-RL-Pipeline-Field-Log"
WISHES = {"opt-in": True, "opt-out": False}
FILES = 8
"""Parts the ring is cut into: the oldest eighth goes at once."""
MOST_FILES = 4 * FILES
"""Torn files of many power cuts count, too."""
MAX_ROW_BYTES = 64 << 10
_NUMBERED = re.compile(r"-(\d{6,})\.jsonl\Z")

log = logging.getLogger("field_log")


class FieldLog:
    """A ring of files in `folder`; without a folder it remembers nothing."""

    def __init__(
        self,
        folder: "Path | None",
        name: str,
        *,
        max_bytes: int,
        max_rows: int,
        opt_in: bool = False,
        keep_private_text: bool = False,
    ) -> None:
        self._folder, self._name = folder, name
        self._max_bytes, self._max_rows = max_bytes, max_rows
        self._file_bytes = max(1, max_bytes // FILES)
        self._file_rows = max(1, max_rows // FILES)
        self._opt_in, self._keep_private_text = opt_in, keep_private_text
        self._lock = threading.Lock()
        self._file, self._bytes, self._rows = None, 0, 0

    @property
    def enabled(self) -> bool:
        """Whether rows are kept at all."""
        return self._folder is not None

    def wish(self, header: "str | None") -> "bool | None":
        """Whether a request is opted in; None where its header is none of `WISHES`."""
        return self._opt_in if header is None else WISHES.get(header.strip().lower())

    def add(self, row: dict) -> bool:
        """Append one row; False where the log is off or the disk refused. Never raises OSError."""
        if not self.enabled:
            return False
        line = self._line(row)
        if len(line) > self._file_bytes:
            log.warning(
                "a row was not kept: it alone has %d bytes, over max_bytes / %d", len(line), FILES
            )
            return False
        with self._lock:
            try:
                self._write(line)
            except OSError as error:
                log.warning("a row was not kept: %s", error.strerror or error)
                self._undo()
                return False
        return True

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _line(self, row: dict) -> bytes:
        private = not row["opted_in"] and not self._keep_private_text
        row = {**row, "cut": False}
        if private:
            row.update(messages=None, answer=None)
        line = _encoded(row)
        if len(line) > min(MAX_ROW_BYTES, self._file_bytes):
            line = _encoded({**row, "messages": None, "answer": None, "cut": True})
        return line

    def _write(self, line: bytes) -> None:
        if self._file is None:
            self._go_on()
        full = self._bytes + len(line) > self._file_bytes or self._rows >= self._file_rows
        if self._file is None or (full and self._rows):
            self._next_file()
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._file.fileno())
        self._bytes += len(line)
        self._rows += 1

    def _undo(self) -> None:
        """Take back what was written of a row that did not fit; where even that fails, leave it."""
        if self._file is None:
            return
        try:
            os.ftruncate(self._file.fileno(), self._bytes)
        except OSError:
            self._close()

    def _go_on(self) -> None:
        """Append to the newest file of an earlier run, if it is whole and as we would have made it.

        One whose last line is torn is left as it is, and one that anybody else can read too.
        """
        found = self._numbered() if self._folder.is_dir() else []
        if not found:
            return
        path = found[-1][1]
        info = path.lstat()
        private = stat.S_ISREG(info.st_mode) and not info.st_mode & 0o077
        if not private or info.st_uid != os.getuid() or not _ends_whole(path):
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags), "ab", buffering=0)
        self._bytes, self._rows = info.st_size, _count_lines(path)

    def _next_file(self) -> None:
        """Begin a new file and take away what is too old."""
        self._close()
        self._folder.mkdir(parents=True, exist_ok=True)
        os.chmod(self._folder, 0o700)
        found = self._numbered()
        rows, size = self._file_rows, self._file_bytes
        for kept, (_, path) in enumerate(reversed(found)):
            rows, size = rows + _count_lines(path), size + path.lstat().st_size
            if rows > self._max_rows or size > self._max_bytes or kept + 1 >= MOST_FILES:
                path.unlink()
        number = found[-1][0] + 1 if found else 1
        path = self._folder / f"{self._name}-{number:06d}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o600), "ab", buffering=0)

    def _numbered(self) -> "list[tuple[int, Path]]":
        """Our files, oldest first."""
        found = []
        for path in self._folder.glob(f"{self._name}-*.jsonl"):
            match = _NUMBERED.search(path.name)
            if match and path.name == f"{self._name}-{match[1]}.jsonl":
                found.append((int(match[1]), path))
        return sorted(found)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._bytes, self._rows = None, 0, 0


def _count_lines(path: Path) -> int:
    """Lines of a regular file, a torn one included; 0 of anything else."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _ends_whole(path: Path) -> bool:
    """Whether a file is empty or ends with a line's end."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _encoded(row: dict) -> bytes:
    return (json.dumps(row, ensure_ascii=True, sort_keys=True) + "\n").encode()
