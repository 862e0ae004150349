"""A hub with one dataset, from a local folder: what `datasets` and huggingface_hub ask for when they stream it."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

REVISION = "a" * 40


@contextlib.contextmanager
def pretend_hub(folder: Path, name: str, breaks_off: str = "") -> Iterator[tuple[str, list[str]]]:
    """Serve `folder` as the dataset `name`. Gives the address, and the paths of the files that were sent.

    The first time that the file `breaks_off` is asked for, the connection ends in its middle.
    """
    sent: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Nothing on the screen."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            # Which of these paths exist.
            wanted = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
            paths = [wanted] if isinstance(wanted, str) else wanted
            self.answer([describe(folder / path) for path in paths if (folder / path).exists()])

        def do_GET(self) -> None:
            address = urlparse(self.path)
            path = unquote(address.path)
            # A listing of a folder, facts of the data set, or a file.
            tree = re.fullmatch(rf"/api/datasets/{name}/tree/[^/]+/?(.*)", path)
            file = re.fullmatch(rf"/datasets/{name}/resolve/{REVISION}/(.*)", path)
            if tree and (folder / tree[1]).is_dir():
                deep = parse_qs(address.query).get("recursive", ["false"])[0].lower() == "true"
                entries = (folder / tree[1]).rglob("*") if deep else (folder / tree[1]).iterdir()
                self.answer([describe(path) for path in sorted(entries)])
            elif re.fullmatch(rf"/api/datasets/{name}(/revision/[^/]+)?", path):
                self.answer({"id": name, "sha": REVISION, "private": False, "disabled": False, "gated": False})
            elif file and (folder / file[1]).is_file():
                self.send(file[1])
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def answer(self, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def send(self, path: str) -> None:
            data = (folder / path).read_bytes()
            # A file, or the range of it that is asked for: a download that broke off goes on.
            part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            start, stop = (int(part[1]), min(int(part[2] or len(data)) + 1, len(data))) if part else (0, len(data))
            self.send_response(206 if part else 200)
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            if part:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            if self.command == "GET":
                sent.append(path)
                first = path == breaks_off and sent.count(path) == 1
                self.wfile.write(data[start : start + (stop - start) // 2] if first else data[start:stop])

    def describe(path: Path) -> dict[str, Any]:
        relative = str(path.relative_to(folder))
        if path.is_dir():
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": relative}
        digest = hashlib.sha1(path.read_bytes()).hexdigest()
        return {"type": "file", "oid": digest, "size": path.stat().st_size, "path": relative}

    # It listens on a free port, in a thread of this process.
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
