"""A PostgreSQL of the tests' own."""

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from machine import free_port, sh, until


class Database:
    """A real PostgreSQL, with a database for MLflow.

    It refuses to be root, and every start of pytest closes root's temporary files to others: hence a folder of its own.
    """

    def __init__(self) -> None:
        self.bin = max(Path("/usr/lib/postgresql").glob("*/bin"))
        self.folder, self.port = Path(tempfile.mkdtemp(prefix="postgres-")), free_port()
        self.user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        shutil.chown(self.folder, "postgres", "postgres")
        command = [self.bin / "initdb", "--pgdata", self.folder / "data", "--username", "mlflow", "--auth", "trust"]
        sh(*self.user, *command, cwd="/")
        self.start()
        self.query("CREATE DATABASE mlflow", "postgres")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        place = ["-p", str(self.port), "-k", str(self.folder), "-h", "127.0.0.1"]
        command = [*self.user, str(self.bin / "postgres"), "-D", str(self.folder / "data"), *place]
        log = (self.folder / "log").open("a")
        self.process = subprocess.Popen(command, cwd="/", stdout=log, stderr=log)
        ready = [str(self.bin / "pg_isready"), "-h", "127.0.0.1", "-p", str(self.port)]
        until(
            lambda: self.process.poll() is not None or subprocess.run(ready, capture_output=True).returncode == 0,
            "PostgreSQL answers",
        )
        if self.process.poll() is not None:
            pytest.fail(f"PostgreSQL does not start:\n{(self.folder / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()
        until(lambda: not any(map(alive, children)), "PostgreSQL's processes end")
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def end(self) -> None:
        """End for good, without a trace."""
        self.kill()
        shutil.rmtree(self.folder)

    def query(self, text: str, database: str = "mlflow") -> list[list[str]]:
        """Return the rows of a query, as text."""
        psql = [self.bin / "psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", "mlflow", "-d", database]
        return [line.split("|") for line in sh(*psql, "-Atc", text).stdout.splitlines()]


def alive(pid: str) -> bool:
    """Say whether a process is there, and not only waiting to be reaped."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
