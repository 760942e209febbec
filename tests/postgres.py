"""A PostgreSQL of the tests' own."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from machine import free_port, install, sh, until


class Database:
    """A real PostgreSQL, with a database for MLflow."""

    def __init__(self, folder: Path) -> None:
        if not list(Path("/usr/lib/postgresql").glob("*/bin/postgres")):
            install("postgresql")
        self.bin = max(Path("/usr/lib/postgresql").glob("*/bin"))
        self.folder, self.port = folder, free_port()
        # it refuses to be root
        self.user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
        folder.mkdir()
        if self.user:
            shutil.chown(folder, "postgres", "postgres")
            for parent in list(folder.parents)[:-2]:
                parent.chmod(parent.stat().st_mode | 0o011)
        sh(*self.user, self.bin / "initdb", "--pgdata", folder / "data", "--username", "mlflow", "--auth", "trust")
        self.start()
        self.query("CREATE DATABASE mlflow", "postgres")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        place = ["-p", str(self.port), "-k", str(self.folder), "-h", "127.0.0.1"]
        command = [*self.user, str(self.bin / "postgres"), "-D", str(self.folder / "data"), *place]
        log = (self.folder.parent / "postgres.log").open("a")
        self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        ready = [str(self.bin / "pg_isready"), "-h", "127.0.0.1", "-p", str(self.port)]
        until(lambda: subprocess.run(ready, capture_output=True).returncode == 0, "PostgreSQL answers")

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def query(self, text: str, database: str = "mlflow") -> list[list[str]]:
        """Return the rows of a query, as text."""
        psql = [self.bin / "psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", "mlflow", "-d", database]
        return [line.split("|") for line in sh(*psql, "-Atc", text).stdout.splitlines()]
