"""Downloads against a server on the loopback address: whole, resumed, interrupted, damaged."""

import hashlib
import http.server
import threading

import pytest

from bachlib import BachError
from bachlib.data.download import fetch, locate

CONTENT = bytes(range(256)) * 40_000  # 10 MB
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(http.server.BaseHTTPRequestHandler):
    stop_after = None  # bytes, then hang up
    ranges = True
    seen: list = []  # noqa: RUF012

    def do_GET(self):
        type(self).seen.append((self.path, self.headers.get("Range")))
        if self.path.endswith(".md5"):
            return self._send(200, f"MD5 (data.zip) = {MD5}\n".encode())
        if self.path != "/data.zip":
            return self._send(404, b"")
        start = int(self.headers["Range"].split("=")[1].rstrip("-")) if self.headers.get("Range") and self.ranges else 0
        if start >= len(CONTENT):
            return self._send(416, b"")
        self._send(206 if start else 200, CONTENT[start:])

    def _send(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.stop_after])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (Server,), {"seen": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        handler.url = f"http://127.0.0.1:{running.server_port}/data.zip"
        yield handler
        running.shutdown()


def test_whole(server, tmp_path, capsys):
    target = fetch(server.url, tmp_path / "d" / "data.zip", MD5)
    assert target.read_bytes() == CONTENT and [p.name for p in target.parent.iterdir()] == ["data.zip"]
    assert "data.zip" in capsys.readouterr().err, "no progress bar"
    fetch(server.url, target, MD5)
    assert len(server.seen) == 1, "a complete file was downloaded again"


def test_interrupted_and_resumed(server, tmp_path):
    server.stop_after = 3_000_000
    with pytest.raises(BachError, match=r"stopped: .*3,000,000 bytes are kept, and the next call resumes"):
        fetch(server.url, tmp_path / "data.zip", MD5)
    assert not (tmp_path / "data.zip").exists()
    server.stop_after = None
    assert fetch(server.url, tmp_path / "data.zip", MD5).read_bytes() == CONTENT
    assert server.seen[-1] == ("/data.zip", "bytes=3000000-")


def test_a_server_that_cannot_resume_starts_over(server, tmp_path):
    (tmp_path / "data.zip.part").write_bytes(CONTENT[:1000])
    server.ranges = False
    assert fetch(server.url, tmp_path / "data.zip", MD5).read_bytes() == CONTENT


def test_a_part_that_is_complete(server, tmp_path):
    (tmp_path / "data.zip.part").write_bytes(CONTENT)
    assert fetch(server.url, tmp_path / "data.zip", MD5).read_bytes() == CONTENT


def test_wrong_checksum_is_removed(server, tmp_path):
    (tmp_path / "data.zip.part").write_bytes(b"x" * 1000)
    with pytest.raises(BachError, match=f"instead of {MD5} and was removed"):
        fetch(server.url, tmp_path / "data.zip", MD5)
    assert list(tmp_path.iterdir()) == []


def test_the_checksum_beside_the_file(server, tmp_path):
    assert fetch(server.url, tmp_path / "data.zip").read_bytes() == CONTENT
    assert server.seen[0][0] == "/data.zip.md5"


def test_nobody_there(tmp_path):
    with pytest.raises(BachError, match=r"Or download it with a browser and put it at .*data\.zip"):
        fetch("http://127.0.0.1:9/data.zip", tmp_path / "data.zip", MD5)


def test_missing_on_the_server(server, tmp_path):
    with pytest.raises(BachError, match="Not Found"):
        fetch(server.url.replace("data", "other"), tmp_path / "other.zip", MD5)


def test_locate_looks_into_the_data_folder_first(tmp_path, monkeypatch):
    monkeypatch.setenv("BACH_DATA_DIR", str(tmp_path))
    (tmp_path / "ml-1m.zip").write_bytes(b"x")
    assert locate("movielens-1m") == tmp_path / "ml-1m.zip"
    assert locate("planted") is None
    for n in (1, 2):
        (tmp_path / f"combined_data_{n}.txt").write_text("1:\n")
    assert locate("netflix") == tmp_path, "several files: the folder"


def test_data_a_person_has_to_fetch(monkeypatch, tmp_path):
    monkeypatch.setenv("BACH_DATA_DIR", str(tmp_path))
    with pytest.raises(BachError, match=r"by hand from https://tianchi\S+; the file is called UserBehavior.csv.zip"):
        locate("taobao")
    with pytest.raises(BachError, match=r"kaggle.*archive.zip"):
        locate("netflix")
    with pytest.raises(BachError, match="your own log: give its path with --path"):
        locate("csv")
