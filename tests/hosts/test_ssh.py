"""A remote on another host, by SSH; tests/template/test_remotes.py has the other remotes."""

import getpass
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from baked import Bake, InstalledProject
from machine import free_port, sh, until
from remotes import assert_clone_gets_the_data, with_plugin

# It reads nothing of this machine's own server, and lets in nobody but who has the key.
CONFIG = """
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
PidFile none
Subsystem sftp internal-sftp
"""


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Start an SSH server, to which `user` in the test's folder is the key; it ends with the test."""
    port = free_port()
    for name in ("host", "user"):
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name)
    (tmp_path / "config").write_text(CONFIG.format(port=port, folder=tmp_path))
    Path("/run/sshd").mkdir(exist_ok=True)
    log = tmp_path / "log"
    log.touch()
    with subprocess.Popen([str(shutil.which("sshd")), "-D", "-f", tmp_path / "config", "-E", log]) as server:
        try:
            until(lambda: server.poll() is not None or "listening" in log.read_text(), "sshd listens")
            assert server.poll() is None, log.read_text()
            yield port
        finally:
            server.terminate()


def test_clone_gets_the_data_from_another_host(
    bake: Bake, project: InstalledProject, port: int, tmp_path: Path
) -> None:
    baked = bake(dvc_remote=f"ssh://{getpass.getuser()}@127.0.0.1:{port}{tmp_path}/data")
    env = with_plugin(baked, tmp_path)
    assert_clone_gets_the_data(baked, env, {"keyfile": str(tmp_path / "user")}, tmp_path)
    assert list((tmp_path / "data" / "files" / "md5").iterdir())
