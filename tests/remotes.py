"""Servers that a DVC remote may be, each of the tests' own, and what every remote must do."""

import shutil
import subprocess
import sys
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from bake import ROOT, in_venv
from baked import BakedProject, copy_venv, run
from machine import encrypt, free_port, until

BUCKET = "bucket"
USER, PASSWORD = "me", "secret"
KNOWN = b64encode(f"{USER}:{PASSWORD}".encode()).decode()
Settings = Mapping[str, str]  # of `dvc remote modify --local storage`


class Files(SimpleHTTPRequestHandler):
    """Gives files of a folder, and takes some by PUT; from who knows the password."""

    protocol_version = "HTTP/1.1"

    def parse_request(self) -> bool:
        """Refuse a stranger's request."""
        known = super().parse_request() and self.headers["Authorization"] == f"Basic {KNOWN}"
        if not known:
            self.send_error(401)
            self.close_connection = True
        return known

    def do_PUT(self) -> None:
        """Write what comes, in chunks or not."""
        path = Path(self.translate_path(self.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(self._received()))
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _received(self) -> Iterator[bytes]:
        if "Content-Length" in self.headers:
            yield self.rfile.read(int(self.headers["Content-Length"]))
            return
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def web(folder: Path) -> Iterator[tuple[str, Settings]]:
    """Serve files over HTTPS; the URL, and what DVC must know."""
    (folder / "files").mkdir()
    settings = {"method": "PUT", "auth": "basic", "user": USER, "password": PASSWORD}
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(folder / "files"))) as server:
        settings["ssl_verify"] = str(encrypt(server, folder))
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://127.0.0.1:{server.server_port}/data", settings
        server.shutdown()


@contextmanager
def bucket(folder: Path) -> Iterator[tuple[str, Settings]]:
    """Start a server of S3 with a bucket; its URL, and what DVC must know."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "--port", str(port)]
    env = {"PYTHONPATH": str(ROOT / "build" / "beside"), "PATH": "/usr/bin:/bin"}
    request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")

    def made() -> bool:
        assert server.poll() is None, (folder / "log").read_text()
        try:
            return urllib.request.urlopen(request).status == 200
        except OSError:
            return False

    with (folder / "log").open("w") as log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as server:
        try:
            until(made, "the server makes a bucket")
            keys = {"access_key_id": USER, "secret_access_key": PASSWORD}
            yield f"s3://{BUCKET}/path", {"endpointurl": endpoint, **keys}
        finally:
            server.terminate()


def with_plugin(project: BakedProject, folder: Path) -> dict[str, str]:
    """Return the variables of an environment that has what the project's locks have beyond the shared one."""
    copy_venv(folder / "venv", project.path / "requirements" / "run.txt")
    return in_venv(project.path, project.env, folder / "venv")


def assert_clone_gets_the_data(project: BakedProject, env: Mapping[str, str], settings: Settings, folder: Path) -> None:
    """As the pages say: settings that git does not see, `dvc push`; in a clone the settings, then `dvc pull`."""

    def set_up(path: Path) -> None:
        for name, value in settings.items():
            run("dvc", "remote", "modify", "--local", "storage", name, value, cwd=path, env=env)

    set_up(project.path)
    run("dvc", "push", cwd=project.path, env=env)
    assert project.run("git", "status", "--porcelain") == ""
    run("git", "clone", "--quiet", project.path, folder / "clone")
    set_up(folder / "clone")
    data = Path("data", "raw", "digits.csv.gz")
    assert not (folder / "clone" / data).exists()
    run("dvc", "pull", f"{data}.dvc", cwd=folder / "clone", env=env)
    assert (folder / "clone" / data).read_bytes() == (project.path / data).read_bytes()
    shutil.rmtree(folder / "clone")
