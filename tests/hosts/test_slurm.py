"""The batch script as it is shipped, under a real Slurm: preempted, out of time, a node lost, an array of seeds."""

import faulthandler
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from bake import VENV, python_path
from baked import InstalledProject, weights
from cluster import CONSTRAINS, Slurm
from machine import awaits_sigterm, halt, sh, until

# Without checkpoints but the one that SIGTERM asks for. The array's last task has this seed, too.
SETTINGS = (
    *("device=cpu", "tracking.enabled=false", "model.width=8", "model.depth=1"),
    *("train.epochs=1", "checkpoint.every=1000", "seed=1"),  # 23 steps
)
REQUEUED = "goes back into the queue"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
# A large model's checkpoint takes longer than torchrun waits by itself, or srun with --kill-on-bad-exit; and a step
# takes long enough that a job is stopped midway.
SLOWER = {
    "checkpoint/checkpoint.py": (
        "rename(aside, final)",
        'import os, time; time.sleep(int(os.environ.get("SLOW", 0)) * ("SLURM_RESTART_COUNT" not in os.environ)); '
        "rename(aside, final)",
    ),
    "record/record.py": ("self._rows.write(", "import time; time.sleep(0.2); self._rows.write("),
}


def words() -> list[str]:
    """Return the arguments of a training with the usual settings."""
    return [word for setting in SETTINGS for word in ("--set", setting)]


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

    def hold(self, count: int = 2, steps: int = 5) -> dict[int, str]:
        """Wait until it trains, then stop its ranks, so that it is midway for sure; return them."""
        rows = self.out / "metrics.jsonl"
        until(lambda: rows.is_file() and rows.read_bytes().count(b"\n") >= steps, f"job {self.id} trains")
        return self.stop(count)

    def stop(self, count: int = 2) -> dict[int, str]:
        """Stop its ranks where they are; return them."""
        ranks = self.ranks()
        for pid in ranks:
            halt(pid)
        assert len(ranks) == count and self["JobState"] == "RUNNING", self.log()
        return ranks


@dataclass(frozen=True)
class Site:
    """A project on a cluster."""

    slurm: Slurm
    project: InstalledProject

    def submit(self, out: str, *options: str, settings: tuple[str, ...] = (), slow: int = 0, prove: str = "") -> Job:
        """Submit a training into `out`; its first life takes so many seconds to write a checkpoint."""
        number = self.sbatch(*options, script=("--out", out, *settings), slow=slow, prove=prove)
        return Job(self.slurm, number, self.project.path / out)

    def sbatch(self, *options: str, script: tuple[str, ...] = (), slow: int = 0, prove: str = "") -> str:
        """Submit the script as its header says, and return the job's number."""
        command = ("sbatch", "--parsable", *options, "deploy/slurm/train.sbatch", *words(), *script)
        env = {**self.env, "SLOW": str(slow), "SAMEBITS_PROVE": prove or "never"}
        return sh(*command, cwd=self.project.path, env=env).stdout.strip()

    @property
    def env(self) -> dict[str, str]:
        """What Slurm's commands need."""
        return {**self.project.env, "SLURM_CONF": self.slurm.env["SLURM_CONF"], "NPROC": "1"}

    def preempt(self) -> None:
        """Have something urgent take all nodes for a moment."""
        command = ("sbatch", "--wait", "--partition=urgent", "--nodes=4", "--output=/dev/null", "--wrap=sleep 1")
        sh(*command, cwd=self.project.path, env=self.env)

    def limit(self, job: Job, minutes: int) -> None:
        """Give a job more or less time."""
        sh("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}", env=self.env)

    @cached_property
    def alone(self) -> Path:
        """The run directory of a training in one process, without Slurm."""
        out = self.project.path / "runs" / "alone"
        self.project.run(self.project.python, "-m", "samebits", "train", *words(), "--out", out)
        return out


@pytest.fixture(scope="module")
def site(project: InstalledProject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A copy of the project, its .venv in place, on a cluster that ends with the tests."""
    path = tmp_path_factory.mktemp("site") / "project"
    shutil.copytree(project.path, path, symlinks=True)
    (path / ".venv").symlink_to(VENV)
    for name, (old, new) in SLOWER.items():
        code = path / "vendor" / "samebits" / name
        assert code.read_text().count(old) == 1
        code.write_text(code.read_text().replace(old, new))
    project = replace(project, path=path, env={**project.env, "PYTHONPATH": python_path(path)})
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    yield Site(slurm, project)
    slurm.stop()


def steps(out: Path) -> bytes:
    """Return the digests of each step of a run."""
    return (out / "trace" / "steps.bin").read_bytes()


def proof_of(out: Path) -> dict[str, Any]:
    """Return what a run's receipt states of its proof."""
    proof: dict[str, Any] = json.loads((out / "receipt.json").read_bytes())["predicate"]["proof"]
    return proof


def assert_went_on(job: Job, times: int = 1) -> None:
    """It was stopped by SIGTERM and went on from that step, and Slurm counts as many restarts."""
    stopped = re.findall(r"stopped by SIGTERM after step (\d+);", job.log())
    resumed = re.findall(r"resumed \S+ after step (\d+)", job.log())
    assert len(resumed) == times == int(job["Restarts"]), job.log()
    assert set(stopped) == set(resumed), job.log()


def test_preempted_jobs_go_on_to_the_same_bits(site: Site) -> None:
    """One has time of grace: it saves, however slowly, and requeues itself. The other is requeued by Slurm at once.

    The first one is of the script's own size: two nodes, with four GPUs each, that CPU trainings leave alone. It proves
    itself, on several numbers of ranks, and is preempted again while it does.
    """
    faulthandler.cancel_dump_traceback_later()  # it takes minutes
    patient = site.submit("runs/patient", "--partition=patient", slow=35, prove="end")
    abrupt = site.submit("runs/abrupt", "--partition=abrupt", "--nodes=1")
    for job, count in ((patient, 2), (abrupt, 1)):
        job.hold(count)  # until Slurm sends SIGCONT with SIGTERM
    site.preempt()
    until(lambda: (patient.out / "metrics.json").is_file() and (patient.out / ".proof").is_dir(), "it proves itself")
    patient.stop()
    site.preempt()
    for job in (patient, abrupt):
        job.ends()
        assert weights(job.out) == weights(site.alone)
        assert steps(job.out) == steps(site.alone)
    assert (patient["NumNodes"], patient["TresPerNode"]) == ("2", "gres:gpu:4")
    assert_went_on(abrupt)
    assert REQUEUED not in abrupt.log()
    log = patient.log()
    assert patient["Restarts"] == "2" and log.count(REQUEUED) == 2, log
    assert re.search(r"stopped by SIGTERM after step (\d+);[^$]*resumed \S+ after step \1\n", log), log
    assert "stopped by SIGTERM while the run proves itself" in log
    proof = proof_of(patient.out)
    assert max(segment["ranks"] for segment in proof["segments"]) > 1 and "number of ranks" not in proof["not_tried"]


def test_an_array_trains_a_seed_per_task(site: Site) -> None:
    """One is cancelled for good, one runs out of time and goes on: neither touches the other."""
    array = site.sbatch("--job-name=sweep", "--array=0-1", "--nodes=1", "--gpus-per-node=0", "--time=10")
    tasks = [Job(site.slurm, f"{array}_{seed}", site.project.path / f"runs/sweep/seed-{seed}") for seed in range(2)]
    cancelled, late = tasks
    with ThreadPoolExecutor() as pool:  # all at once: a task that nobody holds yet may end
        ranks = dict(zip(tasks, pool.map(lambda task: task.hold(count=1), tasks), strict=True))
    assert late["JobId"] == array

    sh("scancel", cancelled.id, env=site.env)  # sends SIGCONT too
    site.limit(late, minutes=2)
    until(lambda: all(map(awaits_sigterm, ranks[late])), "the late task's rank is sent SIGTERM")
    site.limit(late, minutes=10)
    for pid in ranks[late]:
        os.kill(pid, signal.SIGCONT)

    late.ends()
    cancelled.ends("CANCELLED")
    assert_went_on(late)
    assert late.log().count(REQUEUED) == 1
    assert "stopped by SIGTERM after step" in cancelled.log() and REQUEUED not in cancelled.log()
    assert [task["Restarts"] for task in tasks] == ["0", "1"]
    assert weights(late.out) == weights(site.alone)
    assert [json.loads((task.out / "run.json").read_bytes())["config"]["seed"] for task in tasks] == [0, 1]


def test_a_job_goes_on_without_a_lost_node(site: Site) -> None:
    """A node falls silent, as without power; the run goes on elsewhere from its newest checkpoint."""
    job = site.submit("runs/lost", settings=("--set=checkpoint.every=5",))
    until(lambda: list((job.out / "checkpoints").glob("0*")), "rank 0 has saved")
    ranks = job.hold()
    (lost,) = {node for node in ranks.values() if node != job["BatchHost"]}
    site.slurm.silence(lost)
    for pid, node in ranks.items():
        if node != lost:
            os.kill(pid, signal.SIGCONT)
    job.ends()
    assert job["Restarts"] == "1" and lost not in job["NodeList"]
    assert re.search(r"resumed \S+ after step [1-9]\d*\n", job.log()), job.log()
    assert weights(job.out) == weights(site.alone)


def test_a_run_proves_itself_on_as_many_ranks_as_its_step_has_memory_for(site: Site) -> None:
    """And is not killed for more. The preempted job has memory for several."""
    out = site.project.path / "runs" / "small"
    memory = "680M" if CONSTRAINS else "9000M"
    step = "srun", f"--mem={memory}", "--nodes=1", "--ntasks=1", site.project.python, "-m", "samebits", "train"
    sh(*step, "--out", out, *words(), cwd=site.project.path, env={**site.env, "SAMEBITS_PROVE": "end"})
    proof = proof_of(out)
    tried = {segment["ranks"] for segment in proof["segments"]}
    if CONSTRAINS:
        assert tried == {1} and proof["not_tried"] == {"number of ranks": "there is room for no other"}
    else:
        assert max(tried) > 1
