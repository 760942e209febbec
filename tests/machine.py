"""What tests need of the machine itself: commands that must succeed, ports, certificates, and patience."""

import os
import re
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 600  # seconds, for what takes a few: the machine may be busy


def sh(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; fail with all that it said."""
    words = list(map(str, command))
    done = subprocess.run(words, **{"capture_output": True, "text": True, **options})
    if done.returncode:
        pytest.fail(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait until something is the case; look less often the longer it takes, for some looks start a program."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > patience:
            pytest.fail(f"{what}: not within {patience:.0f} s")
        time.sleep(min(1, 0.1 + waited / 20))


def writer(path: Path) -> int:
    """Return the process that has a file open for writing."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended
            flags = re.search(r"^flags:\s*(\d+)", (link.parents[1] / "fdinfo" / link.name).read_text(), re.MULTILINE)
            if link.readlink() == path and flags and int(flags[1], 8) & os.O_WRONLY:
                return int(link.parts[2])
    pytest.fail(f"{path}: nobody writes it")


def halt(pid: int) -> None:
    """Stop a process where it is, and wait until it has stopped: a signal that is sent before would come first."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: "State:\tT" in Path(f"/proc/{pid}/status").read_text(), f"process {pid} stops")


def awaits_sigterm(pid: int) -> bool:
    """Say whether SIGTERM was sent to a process that is stopped."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = [int(mask, 16) for mask in re.findall(r"^(?:Shd|Sig)Pnd:\s*(\w+)", status, re.MULTILINE)]
    return any(mask & 1 << signal.SIGTERM - 1 for mask in pending)


def encrypt(server: ThreadingHTTPServer, folder: Path) -> Path:
    """Have a server on 127.0.0.1 speak TLS; return its certificate, which nobody else signed."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subject = "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"
    curve = "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"
    sh("openssl", "req", "-x509", *curve, *subject, "-keyout", key, "-out", certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return certificate
