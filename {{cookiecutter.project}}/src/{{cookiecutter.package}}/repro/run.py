"""One run as `train.py` holds it: from the switches to the summary."""

import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from . import checkpoint, determinism, fingerprint, manifest, preflight, progress, receipt, trace, world
from .address import content_address, digest
from .errors import Failure, Preempted, Refused
from .files import read_json, rename, write_json
from .record import ADDRESS, ENVIRONMENT, METRICS, WEIGHTS, Record, code_state
from .settings import Settings
from .trace import Trace
from .tracking import Follower


class Run:
    """Entering sets the switches and joins the ranks; leaving closes the record and the process group.

    Attributes:
        world: this process's rank, the world size and the device.
        trace: takes in what happens in each step.
        address: the content address.
        environment: the numeric environment (what its digest is made of).
    """

    def __init__(self, config: Settings, out: Path) -> None:
        self.config, self.out = config, out
        self._latest: dict[str, float] = {}
        self._results: dict[str, str] = {}
        self._record: Record | None = None
        self._follower: Follower | None = None
        self._saver: checkpoint.Saver | None = None
        self._resumed = self._terminated = False

    def __enter__(self) -> Self:
        determinism.apply(self.config.determinism)
        self.world = world.join(self.config.device, self.config.parallel)
        self._old_handler = signal.signal(signal.SIGTERM, self._terminate)
        try:
            self._agree()
            self.world.together(self._open_record)
            self.trace = Trace(self.config.trace.level, self.out, self.world, self.config.trace.values)
        except BaseException as error:  # `with` leaves only what was entered
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True  # seen after the step, by all ranks together

    def _agree(self) -> None:
        """Everything that could make ranks compute different numbers, compared before they compute any."""
        data = self.world.together(lambda: manifest.verify(Path(self.config.data.prepared)))
        self.address = content_address(self.config, data, self.world.size)
        self.environment = fingerprint.numeric_environment(self.config.determinism, self.world.device)
        report = self.address.preimage | {"environment": self.environment}
        preflight.require_agreement(preflight.flatten(report), self.world, "the ranks disagree before step 0:")

    def _open_record(self) -> None:
        if not self.world.leads:
            return
        receipt.require_key(self.config.receipt.key)
        record = Record(self.out)
        if record.unfinished():
            self._require_same_address()
            record.resume()
            self._resumed = True
            self._record_environment()
        else:
            for left in (checkpoint.FOLDER, trace.FOLDER):  # by an older run
                shutil.rmtree(self.out / left, ignore_errors=True)
            self._begin_record(record)
        self._record = record
        if self.config.tracking.enabled:
            self._follower = Follower(self.out)

    def _require_same_address(self) -> None:
        there = read_json(self.out / ADDRESS)["preimage"]
        if differing := preflight.differences(there, self.address.preimage):
            raise Refused(
                f"{self.out} holds an unfinished run of another content address ({_named(differing)}). "
                f"Finish that one, remove the folder, or choose another with --out"
            )

    def _record_environment(self) -> None:
        """Write down what the run is on, and say so where it went on in another numeric environment."""
        path = self.out / ENVIRONMENT
        news = fingerprint.record(self.environment, self.config.compute, world_size=self.world.size)
        earlier = read_json(path) if self._resumed else news
        if earlier["class"] != news["class"]:
            differing = _named(preflight.differences(earlier["preimage"], news["preimage"]))
            _tell(f"{self.out} goes on in another numeric environment, its bits are not promised. {differing}")
            news["class"] = f"mixed/{digest([earlier['class'], news['class']])[:16]}"
        write_json(path, news)

    def _begin_record(self, record: Record) -> None:
        # before run.json, which says that there is a run to go on with: that one needs its address
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / ADDRESS, self.address.record())
        self._record_environment()
        code, patch = code_state()
        record.begin(
            patch,
            code=code,
            config=self.config.flat(),
            tracking=self.config.tracking.model_dump(),
            dataset={"name": Path(self.config.data.raw).name, "digest": self.address.parts["data"]},
            tags={
                "repro.address": self.address.digest,
                "repro.environment": digest(self.environment),
                "repro.data": self.address.parts["data"],
                "repro.lock": self.address.parts["lock"],
                "repro.commit": code["commit"],
                "repro.dirty": code["dirty"],
                "repro.image": self.environment["image"],
            },
        )

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Give model and optimizer the newest valid checkpoint's state; return how many steps are done.

        All ranks get the lead's copy, so the others need not see its disk. Then all compare their weights.
        """
        self._model, self._optimizer = model, optimizer
        settings, folder = self.config.checkpoint, self.out / checkpoint.FOLDER
        snapshot = checkpoint.newest(folder, _tell) if self._resumed else None
        snapshot = checkpoint.share(snapshot, self.world)
        if snapshot:
            checkpoint.put(snapshot, model, optimizer)
        done = snapshot.step if snapshot else 0
        preflight.require_same_weights(model.state_dict(), done, self.world)
        outputs = not self.config.compute.compile  # whose modules have no outputs to look at
        self.world.together(lambda: self.trace.begin(model, optimizer, done, outputs))
        if self._record:
            origin = {"address": self.address.digest, "environment": digest(self.environment)}
            self._saver = checkpoint.Saver(folder, origin, settings, first=self._sync)
            if self._resumed:
                self._record.went_on(done)
                print(f"resumed {self.out} after step {done}", flush=True)
        return done

    def _sync(self) -> None:
        assert self._record
        self._record.sync()
        self.trace.sync()

    def steps(self, start: int, stop: int) -> Iterator[int]:
        """Yield the steps; after each, compare and save what is due, and end where SIGTERM asks for it.

        Raises:
            Preempted: after the step in which any rank got SIGTERM, once the state is saved.
        """
        steps = progress.shown(start, stop, self._shown) if self.world.leads else iter(range(start, stop))
        for step in steps:
            yield step
            self._after(step + 1, stop)

    def _after(self, done: int, stop: int) -> None:
        every = self.config.integrity.compare_every
        if every and (done % every == 0 or done == stop):
            preflight.require_same_weights(self._model.state_dict(), done, self.world)
        failure = self._saver.failure() if self._saver else None
        kept = 0 <= self.config.trace.values < done  # the step that was asked for
        ends = self._terminated or kept
        preempted, failed, *shares = self.world.total(ends, failure is not None, *self.trace.share())
        if failed:
            raise failure or Failure("the lead could not write a checkpoint")
        self.trace.step(done - 1, shares, last=done == stop)
        if preempted or done == stop or done % self.config.checkpoint.every == 0:
            self.trace.flush()
            if self._saver:
                self._saver.save(done, self._model, self._optimizer)
        if preempted and done < stop:
            self.world.together(self._finish_saving)  # launchers kill the others soon after one has ended
            why = "as trace.values asks" if kept else "by SIGTERM"
            raise Preempted(f"stopped {why} after step {done}; the same command goes on from there")

    def _finish_saving(self) -> None:
        if self._saver:
            self._saver.wait()
            if failure := self._saver.failure():
                raise failure

    def rechecks(self, step: int, shard: int) -> bool:
        """Whether the gradient of this shard is to be computed twice and compared."""
        every = self.config.integrity.recompute_every
        return bool(every) and step % every == 0 and shard == step // every % self.config.parallel.shards

    def _shown(self) -> str:
        return "  ".join(f"{name} {progress.number(value)}" for name, value in self._latest.items())

    def log(self, step: int, **metrics: float | torch.Tensor) -> None:
        """Record numbers of a step that is done (counted from 0)."""
        if self._record:
            numbers = {name: float(value) for name, value in metrics.items()}
            self._latest |= numbers
            self._record.log(step, numbers)

    def finish(self, model: nn.Module, **metrics: float) -> None:
        """Write the weights and the final metrics."""
        if self._record:
            self._finish_saving()
            beside = self.out / f"{WEIGHTS}.part"
            try:
                save_model(model, str(beside))
            except (OSError, SafetensorError) as error:
                raise Failure(f"{self.out / WEIGHTS} was not written: {error}; the same command tries again") from None
            shutil.copymode(self.out / ADDRESS, beside)  # safetensors leaves it to its owner alone
            rename(beside, self.out / WEIGHTS)
            write_json(self.out / METRICS, metrics)
            weights = manifest.sha256_file(self.out / WEIGHTS)
            name = receipt.write(self.out, receipt.statement(self.out, weights, self.trace.root))
            self._results = {"weights": weights, "trace": self.trace.root or "off", "receipt": name}
            self._results |= {name: progress.number(value) for name, value in metrics.items()}
            if self.config.receipt.key:
                try:
                    receipt.sign(self.out, self.config.receipt.key)
                except Failure as failure:
                    _tell(str(failure))  # no reason to lose the run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        preempted = isinstance(error, Preempted)
        if isinstance(error, Failure):
            # Told now, and SIGTERM only noted until the end: torchrun sends it as soon as one rank has ended.
            error.tell()
        else:
            signal.signal(signal.SIGTERM, self._old_handler)
        if not (isinstance(error, Failure) and error.local):
            world.leave()  # else the launcher is to see this rank's exit before the others', who miss it in the group
        if self._record:
            if isinstance(error, Failure):
                with suppress(Failure):
                    self.trace.flush()  # the last whole step
            tags = {f"repro.{name}": self._results[name] for name in ("weights", "trace", "receipt") if self._results}
            self._record.end("KILLED" if preempted else "FAILED" if error else "FINISHED", tags)
            patience = 0 if self._terminated else self.config.tracking.wait_seconds  # who sends SIGTERM is in a hurry
            tracked = self._follower.finish(patience) if self._follower else "off"
            if not error:
                self._summarise(tracked)
        signal.signal(signal.SIGTERM, self._old_handler)

    def _summarise(self, tracked: str) -> None:
        lines = self._results | {"address": self.address.digest, "tracked": tracked}
        width = max(map(len, lines))
        for name, value in lines.items():
            print(f"{name:{width}}  {value}", flush=True)


def _named(differences: list[preflight.Difference]) -> str:
    """The fields, with both values."""
    return "; ".join(f"{d.field}: {d.one} there, {d.other} here" for d in differences)


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
