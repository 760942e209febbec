"""Hosts to train on: namespaces with a network, a name and a disk each, on a flag; and cables that fail.

A host's own name leads to 127.0.1.1, as Debian has it, so hosts meet only where they are told their interface.
"""

import fcntl
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Self

from bake import python_path
from baked import InstalledProject
from machine import sh, until

RUN = "run"  # where each host's training is told to write
ENTER = 'echo "$0" > /proc/sys/kernel/hostname; mount --bind "$1" /etc/hosts; shift; exec "$@"'
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 2, 0x1000  # linux/if_tun.h


class SlowCable(threading.Thread):
    """Two TAP devices; frames travel between them for `delay` seconds, and a share of them gets lost."""

    def __init__(self, delay: float, loss: float) -> None:
        super().__init__(name="cable")
        self.delay, self.loss, self.carried, self.lost = delay, loss, 0, 0
        self.ends = [os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK) for _ in range(2)]
        self.names = [self._device(end) for end in self.ends]
        self._unplugged = threading.Event()

    def _device(self, end: int) -> str:
        """Make the device and return the name that the kernel chose."""
        requested = struct.pack("16sH22x", b"slow%d", IFF_TAP | IFF_NO_PI)
        return fcntl.ioctl(end, TUNSETIFF, requested)[:16].rstrip(b"\0").decode()

    def run(self) -> None:
        """Carry frames until it is unplugged."""
        chance, travelling = random.Random(0), deque[tuple[float, int, bytes]]()
        while not self._unplugged.is_set():
            pause = travelling[0][0] - time.monotonic() if travelling else 0.1
            for end in select.select(self.ends, [], [], max(0, pause))[0]:
                frame = os.read(end, 65536)
                self.carried += 1
                if chance.random() < self.loss:
                    self.lost += 1
                else:
                    travelling.append((time.monotonic() + self.delay, sum(self.ends) - end, frame))
            while travelling and travelling[0][0] <= time.monotonic():
                _, end, frame = travelling.popleft()
                with suppress(OSError):  # the device is not up yet
                    os.write(end, frame)

    def unplug(self) -> None:
        """Stop, and remove both devices."""
        self._unplugged.set()
        self.join()
        for end in self.ends:
            os.close(end)


class Hosts:
    """Hosts on a flag that is a namespace too, so that the machine's own network neither sees nor filters them."""

    def __init__(self, project: InstalledProject, folder: Path) -> None:
        self.project, self.folder, self.prefix = project, folder, f"repro-{os.getpid()}-"
        self.count, self.cables, self.processes = 0, list[SlowCable](), list[subprocess.Popen[bytes]]()

    def __enter__(self) -> Self:
        sh("ip", "netns", "add", self.namespace("flag"))
        self.ip("flag", "link add bridge up type bridge")
        return self

    def __exit__(self, *failure: object) -> None:
        namespaces = [name for name in sh("ip", "netns").stdout.split() if name.startswith(self.prefix)]
        for name in namespaces:
            kill(name)
        for process in self.processes:
            process.wait()
        for cable in self.cables:
            cable.unplug()
        for name in namespaces:
            sh("ip", "netns", "delete", name)

    def add(self, slow: SlowCable | None = None) -> None:
        """Add a host with a copy of the project, joined to the switch by a good cable, or by a slow one."""
        host = self.count
        self.count += 1
        sh("ip", "netns", "add", self.namespace(host))
        if slow:
            slow.start()
            self.cables.append(slow)
            for name, where in zip(slow.names, ((host, "eth0"), ("flag", f"port{host}")), strict=True):
                sh("ip", "link", "set", name, "netns", self.namespace(where[0]), "name", where[1])
        else:
            self.ip("flag", f"link add port{host} type veth peer name eth0 netns {self.namespace(host)}")
        self.ip("flag", f"link set port{host} master bridge up")
        self.ip(host, f"address add 10.77.0.{host + 1}/24 dev eth0")
        self.ip(host, "link set eth0 up")
        self.ip(host, "link set lo up")
        shutil.copytree(self.project.path, self.path(host), symlinks=True)

    def ip(self, where: int | str, words: str) -> None:
        """Run iproute2 on a host, or on the flag."""
        sh("ip", "-n", self.namespace(where), *words.split())

    def namespace(self, where: int | str) -> str:
        """Return the name of the network namespace of a host, or of the flag."""
        return f"{self.prefix}{where}"

    def path(self, host: int) -> Path:
        """Return a host's copy of the project."""
        return self.folder / f"host{host}"

    def log(self, host: int) -> str:
        """Return what a host printed in its last training."""
        return (self.folder / f"host{host}.log").read_text()

    def start(self, meeting: str, *words: str, **variables: str) -> None:
        """Start the same training on all hosts; `{host}` in `meeting` stands for their number."""
        self.processes = [self._start(host, meeting, *words, **variables) for host in range(self.count)]

    def _start(self, host: int, meeting: str, *words: str, **variables: str) -> "subprocess.Popen[bytes]":
        known = {f"host{other}": f"10.77.0.{other + 1}" for other in range(self.count)}
        known |= {"localhost": "127.0.0.1", f"host{host}": "127.0.1.1"}
        hosts = self.folder / f"host{host}.hosts"
        hosts.write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        enter = ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts", "sh", "-c", ENTER, f"host{host}"]
        nodes = [f"--nnodes={self.count}", "--nproc-per-node=1", *meeting.format(host=host).split()]
        torchrun = [str(self.project.python), "-m", "torch.distributed.run", *nodes]
        command = [*enter, str(hosts), *torchrun, "-m", "samebits", "train", *words, "--out", RUN]
        env = {**self.project.env, "PYTHONPATH": python_path(self.path(host)), "GLOO_SOCKET_IFNAME": "eth0"} | variables
        with (self.folder / f"host{host}.log").open("w") as log:
            return subprocess.Popen(command, cwd=self.path(host), env=env, stdout=log, stderr=log)

    def trains(self, rows: int) -> None:
        """Wait until rank 0 has recorded so many rows, and is not at its end."""
        path = self.path(0) / RUN / "metrics.jsonl"
        until(lambda: path.is_file() and path.read_bytes().count(b"\n") >= rows, f"rank 0 has {rows} rows")
        assert all(process.poll() is None for process in self.processes), self.log(0)

    def ended(self, patience: float) -> list[int]:
        """Return the exit codes of all hosts, on which all processes must end by themselves in time."""
        until(lambda: all(process.poll() is not None for process in self.processes), "all hosts end", patience)
        assert not any(pids(self.namespace(host)) for host in range(self.count))
        return [process.returncode for process in self.processes]

    def kill(self, host: int) -> None:
        """SIGKILL to all processes of a host: its kernel says so to the others."""
        kill(self.namespace(host))

    def cut(self, host: int) -> None:
        """Silence: what a host sends reaches nobody, nor do others reach it."""
        self.ip("flag", f"link set port{host} down")

    def mend(self, host: int) -> None:
        """Undo `cut`."""
        self.ip("flag", f"link set port{host} up")


def pids(namespace: str) -> list[int]:
    """Return the processes of a namespace."""
    return [int(word) for word in sh("ip", "netns", "pids", namespace).stdout.split()]


def kill(namespace: str) -> None:
    """SIGKILL to all processes of a namespace, and to those that they start meanwhile."""
    while found := pids(namespace):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
