"""A Docker engine with BuildKit of the tests' own, and a base image for where no registry can be asked."""

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from machine import PATIENCE, sh, until

# Its engine and build plug-in run on any Linux with glibc 2.34; their BuildKit knows SOURCE_DATE_EPOCH.
ENGINE_SUITE, ENGINE = "trixie", ("docker.io", "docker-cli", "docker-buildx", "containerd")
BASE_SUITE, BASE_PYTHON = "bookworm", "3.11"


@dataclass(frozen=True)
class Engine:
    """An engine, by the environment in which `docker` reaches it."""

    env: Mapping[str, str]

    def docker(self, *words: str | Path) -> str:
        """Run a command of docker; what it prints."""
        return sh("docker", *words, env=self.env).stdout

    def succeeds(self, *words: str) -> bool:
        """Say whether a command of docker does."""
        return subprocess.run(["docker", *words], env=self.env, capture_output=True).returncode == 0

    def inspect(self, image: str) -> dict[str, Any]:
        """Return what the engine knows of an image."""
        return dict(json.loads(self.docker("image", "inspect", image))[0])


@contextmanager
def engine(folder: Path) -> Iterator[Engine]:
    """Start an engine that keeps everything in a folder; it ends with the tests, and touches no other one."""
    unpack(folder / "programs")
    plugins = folder / "config" / "cli-plugins"
    plugins.mkdir(parents=True)
    (plugins / "docker-buildx").symlink_to(folder / "programs/usr/libexec/docker/cli-plugins/docker-buildx")
    programs = ":".join(str(folder / "programs/usr" / name) for name in ("bin", "sbin"))
    socket = f"unix://{folder / 'socket'}"
    env = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "DOCKER_HOST": socket,
        "DOCKER_CONFIG": str(folder / "config"),
    }
    places = [f"--{name}={folder / name}" for name in ("data-root", "exec-root", "pidfile")]
    # what it mounts ends with it
    command = ["unshare", "--mount", "dockerd", "--iptables=false", "--bridge=none", f"--host={socket}", *places]
    log = (folder / "log").open("w")
    with subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True) as daemon:
        try:
            engine = Engine(env)
            until(lambda: daemon.poll() is not None or engine.succeeds("info"), "dockerd answers")
            assert daemon.poll() is None, (folder / "log").read_text()[-3000:]
            yield engine
        finally:
            daemon.terminate()
            daemon.wait(PATIENCE)
            # some gigabytes, which nobody waits for
            subprocess.Popen(["rm", "--recursive", "--force", folder / "data-root"], start_new_session=True)


@cache
def mirror() -> str:
    """Return the URL of a Debian archive: the one that apt takes packages from here, or DEBIAN_MIRROR."""
    used = sh("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages").stdout.split()
    named = [os.environ.get("DEBIAN_MIRROR", ""), *(url for url in used if url.rstrip("/").endswith("/debian"))]
    if not any(named):
        pytest.fail("apt takes nothing from a Debian archive here: set DEBIAN_MIRROR to the URL of one")
    return next(filter(None, named)).rstrip("/")


def fetched(path: str) -> bytes:
    """Return a file of the Debian archive."""
    with urllib.request.urlopen(f"{mirror()}/{path}", timeout=120) as answer:
        return bytes(answer.read())


def unpack(target: Path) -> None:
    """Unpack the engine's packages, each with the checksum that the archive's index gives."""
    index = fetched(f"dists/{ENGINE_SUITE}/main/binary-amd64/Packages.xz")
    listed = subprocess.run(["xz", "--decompress", "--stdout"], input=index, capture_output=True, check=True)
    entries = listed.stdout.decode().split("\n\n")
    for name in ENGINE:
        (entry,) = (entry for entry in entries if entry.startswith(f"Package: {name}\n"))
        fields = dict(re.findall(r"^(\w+): (.*)$", entry, re.MULTILINE))
        package = target.with_suffix(".deb")
        package.write_bytes(fetched(fields["Filename"]))
        assert sh("sha256sum", package).stdout.split()[0] == fields["SHA256"]
        sh("dpkg", "-x", package, target)


def standin(engine: Engine, folder: Path) -> str:
    """Make an image that stands in for the CUDA base: Debian, without package lists, as official images are."""
    name = f"standin-base:{BASE_SUITE}"
    root = folder / "root"
    sh("debootstrap", "--variant=minbase", "--include=ca-certificates", BASE_SUITE, root, mirror())
    for left in ("var/lib/apt/lists", "var/cache/apt"):
        for path in (root / left).rglob("*"):
            if path.is_file():
                path.unlink()
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as tar:
        sh("docker", "import", "-", name, stdin=tar.stdout, env=engine.env)
    shutil.rmtree(root)
    return name
