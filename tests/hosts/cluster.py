"""A Slurm of four nodes, all of them on this machine."""

import os
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from machine import free_port, sh, until

GROUPS = Path("/sys/fs/cgroup/memory")  # control groups that hold memory, of the first version
CONSTRAINS = os.access(GROUPS / "cgroup.procs", os.W_OK)  # whether a job can be held to its memory on this machine
# Nodes have the names of addresses, which resolve on every machine. What a test would wait for in vain is short:
# cred_expire is how long a requeued job rests.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={port}
FirstJobId={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin={task}
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerNode=20000
SlurmdParameters=config_overrides
GresTypes=gpu
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
MessageTimeout=5
SlurmdTimeout=6
{nodes}
PartitionName=patient Nodes=ALL PriorityTier=1 GraceTime=60 Default=YES
PartitionName=abrupt Nodes=ALL PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""

# the first process of a process namespace, with which all of them end
START = """
cd {folder}
munged --foreground --force --socket munge.socket --key-file munge.key --pid-file munge.pid --seed-file munge.seed \
    --log-file munged.log >>munged.log 2>&1 &
until munge --no-input --socket {folder}/munge.socket; do sleep 0.1; done >/dev/null 2>&1
slurmctld -D -c >slurmctld.log 2>&1 &
until scontrol ping | grep UP; do sleep 0.1; done >/dev/null 2>&1
for node in {names}; do slurmd -D -N $node >slurmd-$node.log 2>&1 & done
wait
"""


class Slurm:
    """slurmctld, a slurmd for each node and munged; `env` is what its commands need."""

    names = ("127.0.0.11", "127.0.0.12", "127.0.0.13", "127.0.0.14")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        nodes = [
            f"NodeName={n} NodeAddr={n} Port={free_port()} CPUs=16 RealMemory=99999 Gres=gpu:4" for n in self.names
        ]
        first = 1 + os.getpid() % 10000  # and with it the ports where jobs meet: not those of another such cluster
        task = "task/cgroup" if CONSTRAINS else "task/none"
        more = {"first": first, "folder": folder, "nodes": "\n".join(nodes), "task": task}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(port=free_port(), **more))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n")
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")  # files that play GPUs
        for name in range(4):
            (folder / f"gpu{name}").touch()
        sh("mungekey", "--create", "--keyfile", folder / "munge.key")
        start = START.format(folder=shlex.quote(str(folder)), names=" ".join(self.names))
        namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command = ["setpriv", "--pdeathsig", "KILL", *namespace, "sh", "-c", start]
        self.process = subprocess.Popen(command, env=self.env, start_new_session=True)
        try:
            until(self.idle, "all nodes are idle")
        except pytest.fail.Exception as failure:
            self.stop()
            pytest.fail(f"Slurm does not start: {failure}\n{self.logs()}")

    def idle(self) -> bool:
        """Say whether all nodes are there, with nothing to do."""
        command = ["sinfo", "--noheader", "--Node", "--partition=patient", "--format=%t"]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        return done.stdout.split() == ["idle"] * len(self.names)

    def logs(self) -> str:
        """Return the end of each daemon's log."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{path.name}:\n" + "\n".join(path.read_text().splitlines()[-8:]) for path in paths)

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm says of a job, or of an array's task."""
        words = sh("scontrol", "show", "job", "--oneliner", job, env=self.env).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def silence(self, name: str) -> None:
        """Stop a node's slurmd, as if the node had lost its power."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_text().split("\0")
                ours = f"SLURM_CONF={self.env['SLURM_CONF']}" in (process / "environ").read_text().split("\0")
            except (OSError, UnicodeDecodeError):
                continue  # it has ended, or is somebody else's
            if ours and words[:4] == ["slurmd", "-D", "-N", name]:
                os.kill(int(process.name), signal.SIGSTOP)

    def stop(self) -> None:
        """End the daemons and every process of every job."""
        self.process.kill()
        self.process.wait()
        for name in self.names:
            for group, *_ in os.walk(GROUPS / f"slurm_{name}", topdown=False):
                with suppress(OSError):  # another such cluster uses it
                    Path(group).rmdir()
