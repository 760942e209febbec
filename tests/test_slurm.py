"""The batch script as it is shipped, under a real Slurm: preempted, out of time, a node lost, an array of seeds."""

import hashlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cluster import Slurm
from conftest import VENV, InstalledProject
from machine import sh, until

# without checkpoints but the one that SIGTERM asks for
SETTINGS = ("device=cpu", "tracking.enabled=false", "train.epochs=4", "checkpoint.every=1000")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def words(*settings: str) -> list[str]:
    """Return the arguments of a training with these settings beyond the usual ones."""
    return [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]


@dataclass(frozen=True)
class Job:
    """A job, or a task of an array, that trains into `out`."""

    slurm: Slurm
    id: str
    out: Path

    def __getitem__(self, field: str) -> str:
        """Return what Slurm says of it."""
        return self.slurm.job(self.id)[field]

    def log(self) -> str:
        """Return all that it printed, in every life."""
        path = Path(self["StdOut"])
        return path.read_text() if path.is_file() else ""

    def ends(self, state: str = "COMPLETED") -> None:
        """Wait for its end, which must be this one."""
        until(lambda: self["JobState"] in ENDED, f"job {self.id} ends")
        assert self["JobState"] == state, f"{self.log()}\n{self.slurm.logs()}"

    def ranks(self) -> dict[int, str]:
        """Return the process id of each rank that runs, and its node."""
        number, found = self["JobId"], {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                text = (process / "environ").read_text(errors="replace")
            except OSError:
                continue  # it has ended
            env = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
            ours = (env.get("SLURM_CONF"), env.get("SLURM_JOB_ID")) == (self.slurm.env["SLURM_CONF"], number)
            if ours and "LOCAL_RANK" in env:
                found[int(process.name)] = env["SLURMD_NODENAME"]
        return found

    def hold(self, count: int = 2, steps: int = 10) -> dict[int, str]:
        """Wait until it trains, then stop its ranks, so that it is midway for sure; return them."""
        rows = self.out / "metrics.jsonl"
        until(lambda: rows.is_file() and rows.read_bytes().count(b"\n") >= steps, f"job {self.id} trains")
        ranks = self.ranks()
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        assert len(ranks) == count and self["JobState"] == "RUNNING", self.log()
        return ranks


@dataclass(frozen=True)
class Site:
    """A project on a cluster."""

    slurm: Slurm
    project: InstalledProject

    def submit(self, name: str, *options: str, settings: tuple[str, ...] = ()) -> Job:
        """Submit a training into runs/NAME, as the script's header says."""
        out = Path("runs", name)
        return Job(self.slurm, self.sbatch(*options, settings=(*settings, f"--out={out}")), self.project.path / out)

    def sbatch(self, *options: str, settings: tuple[str, ...] = ()) -> str:
        """Submit the script and return the job's id."""
        script = ("deploy/slurm/train.sbatch", *words(), *settings)
        return sh("sbatch", "--parsable", *options, *script, cwd=self.project.path, env=self.env).stdout.strip()

    @property
    def env(self) -> dict[str, str]:
        return {**self.project.env, "SLURM_CONF": self.slurm.env["SLURM_CONF"], "NPROC": "1"}

    def urgent(self) -> str:
        """Submit what preempts everything else."""
        command = ("sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--output=/dev/null", "--wrap=sleep 1")
        return sh(*command, cwd=self.project.path, env=self.env).stdout.strip()

    def scontrol(self, *words: str) -> None:
        """Do something to a job."""
        sh("scontrol", *words, env=self.env)

    def alone(self, *settings: str) -> Path:
        """Train in one process, without Slurm; return the run directory."""
        out = self.project.path / "runs" / "-".join(("alone", *settings))
        if not out.exists():
            self.project.run(self.project.python, "-m", "repro_project.train", *words(*settings), "--out", out)
        return out


@pytest.fixture(scope="module")
def site(project: InstalledProject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A copy of the project with its .venv, on a cluster that ends with the tests."""
    path = tmp_path_factory.mktemp("site") / "project"
    shutil.copytree(project.path, path, symlinks=True)
    (path / ".venv").symlink_to(VENV)
    project = replace(project, path=path, env={**project.env, "PYTHONPATH": str(path / "src")})
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    yield Site(slurm, project)
    slurm.stop()


def weights(out: Path) -> str:
    """Return the SHA-256 of a finished run's weights."""
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def assert_went_on(job: Job, times: int = 1) -> None:
    """It was stopped by SIGTERM and went on from that step, and Slurm counts as many restarts."""
    stopped = re.findall(r"stopped by SIGTERM after step (\d+);", job.log())
    resumed = re.findall(r"resumed \S+ after step (\d+)", job.log())
    assert len(resumed) == times == int(job["Restarts"]), job.log()
    assert set(stopped) == set(resumed), job.log()


def test_two_nodes_train_to_the_bits_of_one_process(site: Site) -> None:
    """The script's own size: two nodes, with four GPUs each, that CPU trainings leave alone."""
    job = site.submit("two")
    job.ends()
    assert (job["NumNodes"], job["TresPerNode"]) == ("2", "gres:gpu:4")
    assert weights(job.out) == weights(site.alone())
    assert site.project.run(VENV / "bin" / "repro", "diff", site.alone(), job.out).startswith("EQUAL")


@pytest.mark.parametrize("partition", ["patient", "abrupt"])
def test_a_preempted_job_goes_on_to_the_same_bits(site: Site, partition: str) -> None:
    """With time of grace, in which it ends early and requeues itself, and without, where Slurm requeues it."""
    job = site.submit(partition, f"--partition={partition}")
    job.hold()  # SIGCONT comes with SIGTERM
    urgent = Job(site.slurm, site.urgent(), job.out)
    urgent.ends()
    job.ends()
    assert_went_on(job)
    assert ("goes back into the queue" in job.log()) is (partition == "patient")
    assert weights(job.out) == weights(site.alone())


def test_a_job_out_of_time_goes_on_to_the_same_bits(site: Site) -> None:
    """Slurm signals the script, the script its ranks; torchrun leaves them time to save."""
    job = site.submit("time", "--time=10")
    ranks = job.hold()
    site.scontrol("update", f"JobId={job.id}", "TimeLimit=2")
    until(lambda: all(map(awaits_sigterm, ranks)), "the ranks are sent SIGTERM")
    site.scontrol("update", f"JobId={job.id}", "TimeLimit=10")
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    job.ends()
    assert_went_on(job)
    assert job.log().count("goes back into the queue") == 1
    assert weights(job.out) == weights(site.alone())


def awaits_sigterm(pid: int) -> bool:
    """Say whether SIGTERM was sent to a process that is stopped."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = [int(mask, 16) for mask in re.findall(r"^(?:Shd|Sig)Pnd:\s*(\w+)", status, re.MULTILINE)]
    return any(mask & 1 << signal.SIGTERM - 1 for mask in pending)


def test_a_cancelled_job_is_saved_and_stays_away(site: Site) -> None:
    job = site.submit("cancelled")
    job.hold()
    sh("scancel", job.id, env=site.env)
    job.ends("CANCELLED")
    until(site.slurm.idle, "all nodes are idle")
    assert "stopped by SIGTERM after step" in job.log()
    assert "goes back into the queue" not in job.log()
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")


def test_an_array_trains_a_seed_per_task(site: Site) -> None:
    """What befalls one task befalls no other, though its number be the array's."""
    options = ("--job-name=sweep", "--array=0-2", "--nodes=1", "--gpus-per-node=0", "--cpus-per-task=1")
    array = site.sbatch(*options)
    tasks = [Job(site.slurm, f"{array}_{seed}", site.project.path / f"runs/sweep/seed-{seed}") for seed in range(3)]
    for task in tasks:
        task.hold(count=1)
    assert tasks[2]["JobId"] == array  # what names this one may name all
    sh("scancel", "--batch", "--signal=TERM", f"{array}_2", env=site.env)
    until(lambda: all(map(awaits_sigterm, tasks[2].ranks())), "the last task's rank is sent SIGTERM")
    for task in tasks:
        for pid in task.ranks():
            os.kill(pid, signal.SIGCONT)
    for task in tasks:
        task.ends()
    assert_went_on(tasks[2])
    assert [task["Restarts"] for task in tasks] == ["0", "0", "1"]
    assert len({weights(task.out) for task in tasks}) == 3
    assert weights(tasks[2].out) == weights(site.alone("seed=2"))


def test_a_job_goes_on_without_a_lost_node(site: Site) -> None:
    """A node falls silent, as without power; the run goes on elsewhere from its newest checkpoint."""
    job = site.submit("lost", settings=("--set=checkpoint.every=5",))
    ranks = job.hold()
    (lost,) = {node for node in ranks.values() if node != job["BatchHost"]}
    site.slurm.silence(lost)
    for pid, node in ranks.items():
        if node != lost:
            os.kill(pid, signal.SIGCONT)
    job.ends()
    assert job["Restarts"] == "1" and lost not in job["NodeList"]
    assert re.search(r"resumed \S+ after step \d*[05]\n", job.log()), job.log()
    assert "goes back into the queue" not in job.log()
    assert weights(job.out) == weights(site.alone())
