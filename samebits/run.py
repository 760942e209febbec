"""One run as `train.py` holds it, from the flags to the receipt."""

import shutil
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import nn

from .address import loaded
from .address.address import content_address, core_files, digest
from .base import progress
from .base.files import exact
from .base.project import Project
from .base.redact import without_credentials
from .base.shape import shown
from .base.text import flatten
from .checkpoint import checkpoint, final
from .checkpoint.keeper import Keeper
from .checkpoint.repeated import Repeated
from .checkpoint.saver import Saver, seen_by_all
from .checkpoint.stop import Stop
from .core import flags, plan, ranks, sampling, shards, weights
from .core.alike import fail_alike, once_per_host, together
from .core.errors import Preempted, RunError, UserError
from .core.loop import Loop, Tamper
from .core.objects import Best
from .core.observer import Observer
from .core.optimizers import Given
from .core.orders import Order
from .core.plan import Indexed
from .core.seeds import derive, seed_everything
from .core.state import State
from .core.step import Step
from .core.trees import Stateful
from .environment import variables
from .environment.portability import Portability
from .environment.watch import Operations
from .finish import finish
from .folder import Folder
from .guards import agreement, data_watch, opened, stages
from .guards.carried import Carried, owners_frames
from .guards.fit import require_fit
from .guards.moved import Moved
from .guards.observers import Opened, Replicas
from .guards.still import Still
from .guards.unsaved import UnsavedState
from .guards.updates import Updates
from .prove import early, hosts, proof
from .prove.beside import Beside
from .prove.lent import lent, tensors_of
from .prove.segments import Segment, chosen
from .record import names, proved, started
from .record.classes import environments
from .record.contradiction import contradiction
from .record.opening import non_portable_before, reported_of
from .record.reading import read_record
from .record.record import ENDS, as_number, ends, require_name
from .stage import C, Collate, Stage, let_read, loading
from .start.anew import Anew
from .trace import profile
from .trace.metrics import Live, Metrics
from .trace.trace import Trace
from .tracking import logged


@dataclass(frozen=True)
class Added:
    """What a process of the analysis adds to the run that it makes of the owner's `train.py`. No config names it.

    Attributes:
        watch: makes what sees the operations of the first step.
        dataset: what takes the place of the dataset, given it and the seed.
        finished: is called at the end of `Run.finish`.
    """

    observers: Sequence[Observer] = ()
    tamper: Tamper | None = None
    watch: Callable[[bool], Operations] = Operations
    dataset: Callable[[Indexed, int], Indexed] = lambda dataset, seed: dataset
    finished: Callable[[], object] = lambda: None


Show = TypeVar("Show", bound=Callable[[int, dict[str, float]], object])
LOOK = 10_000  # samples of which two orders are compared
REASON = 200  # characters, at most
TAGS = "weights", "trace", "proof", "receipt", *ENDS  # of what is printed in the end
ADDED = ContextVar("ADDED", default=Added())  # noqa: B039 - it is frozen


class Run(Stage[C]):
    """A training. Entering sets the flags, joins the ranks and seeds the generators; leaving closes the record.

    Attributes:
        address: the content address.
    """

    def __init__(self, project: Project, config: C, out: Path) -> None:
        super().__init__(project, config, out)
        self._added = ADDED.get()
        self._metrics = Metrics(self._write)
        self._live: list[Live] = []
        self._varying: set[str] = set()  # names of logged numbers
        self._has_failed = False
        self._folder: Folder | None = None
        self._loop: Loop | None = None
        self._keeper: Keeper | None = None
        self._repeated: Repeated | None = None
        self._still: Still | None = None
        self._proof: proof.Proof | None = None
        self._results: dict[str, str] = {}
        self._numbers: dict[str, str] = {}
        self._is_finished = False

    def __enter__(self) -> Self:
        flags.apply(self.config.options.determinism)
        self.world = ranks.join(self.config.device, self.config.options.parallel)
        self._portability = Portability(self.config, self.world, self._added.watch)
        self._data_watch: data_watch.DataWatch | None = None
        self._trace = Trace(self.config.trace.level, self.out, self.world, self.config.trace.values)
        self._stop = Stop(self.config.trace.values)
        try:
            self._agree()
            together(self.world, self._open)
            seed_everything(derive(self.config.seed, "init"))  # for the weights that are made next
            self._portability.watch.begin()
        except BaseException as error:  # `with` leaves only what was entered
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _agree(self) -> None:
        """Compare all that could make ranks compute different numbers, before they compute any."""
        main = self.world.is_main
        fail_alike(self.world, proof.again_in_vain(self.out) if main else None, main)
        data = once_per_host(self.world, self._data, self.config.data.model_dump_json())
        let_read(data, self.config)
        self._require_start()
        self.address = content_address(self.project, self.config, data)
        loaded.require_unchanged(self.project, self.address.code)
        # Two releases with one arithmetic may still exchange messages in another order: compare the files, too.
        files = {"core": core_files(self.address.code)}
        report = self.address.preimage | files | {"environment": self.environment}
        agreement.require_agreement(flatten(report), self.world, "the ranks disagree before step 0:")
        known = together(self.world, lambda: non_portable_before(self.out) if self.world.is_main else {})
        self._portability.meet(self.world.broadcast_object(known))

    def _data(self) -> dict[str, Any]:
        """The manifest of the data, which this rank watches for its host."""
        self._still = Still(self.config.data)
        return self._still.manifest

    def _require_start(self) -> None:
        """Each host sees the weights from which the run is to start."""
        start = self.config.start
        once_per_host(self.world, partial(started.require, start), start.model_dump_json())

    def _require_still(self) -> None:
        stages.require_still()
        if self._still:
            self._still.require()

    @property
    def environment(self) -> dict[str, Any]:
        """The numeric environment (what its digest is made of)."""
        return self._portability.environment

    def _open(self) -> None:
        if self.world.is_main:
            here, calling = self._portability.record(), self._portability.calling
            self._folder = Folder(self.project, self.config, self.out, self.address, here, calling, _report)

    def _judged(self) -> None:
        """The first step has shown the operations of the run."""
        if self._portability.non_portable and self._folder:
            self._folder.change_environment(self._portability.record())
            if self._keeper and self._keeper.saver:
                self._keeper.saver.origin = self._origin()
            if self._portability.portable:
                _report("\n".join(reported_of(self._portability.non_portable)))

    def _origin(self) -> checkpoint.Origin | None:
        """Whose checkpoints the run's are."""
        if not self._folder:
            return None
        earlier = environments(read_record(self.out, names.ENVIRONMENT))
        return checkpoint.Origin(self.address.digest, digest(self.environment), earlier)

    def steps(
        self,
        model: nn.Module,
        optimizer: Given,
        dataset: Indexed,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        state: Mapping[str, Stateful] | None = None,
        units: Sequence[nn.Module] = (),
        unsaved: Collection[str] = (),
        order: Order | None = None,
        collate: Collate | None = None,
    ) -> Iterator[Step]:
        """Yield the steps that are still to do: all, or those after the newest valid checkpoint.

        `optimizer` is one of torch.optim's, or a list of several that share no parameter.

        `state` names objects of the loop's own that a later step depends on, such as a scheduler or an average of the
        weights. Checkpoints hold what their `state_dict` gives.

        `units` are the modules, such as a transformer's blocks, whose weights `parallel.shard=full` gathers one at a
        time; without them, the children of the largest ModuleList or Sequential.

        `order` is that of the samples of an epoch: `Weighted`, `ByLength`, or a function of the number of samples and
        an epoch's key, whose `items(positions)` are the samples there. Without it each epoch is a shuffle of its own.

        `collate` makes a micro-batch of a list of items, such as by padding; it may draw. Without it torch's
        `default_collate` does.

        `unsaved` are local variables of the loop, and attributes of modules and optimizers, that change and on which no
        bit depends, such as the time of the last step. Other variables are refused; attributes are saved, or named
        where no checkpoint can hold them.

        The run has as many steps as `epochs` epochs of `dataset` take, or `steps`. After each one the ranks compare
        and save what is due, and end where SIGTERM asks for it.

        Raises:
            UserError: the loop forgets a line, or the optimizer is not the model's.
            Preempted: after the step in which any rank got SIGTERM, or one step later, once the state is saved.
        """
        if self._loop:
            raise UserError("run.steps() was called twice: a run is one loop; give it all epochs or steps at once")
        options = self.config.options
        planned, stop = plan.planned(dataset, options, epochs, steps, order)
        if order:
            self._require_order(planned)
        profile.steps_of(self.config.trace.profile, stop)
        held = State.of(model, optimizer, state or {})
        require_fit(model, self.world.device, moves=options.parallel.shard == "full" and self.world.size > 1)
        if self.config.start.addressed:
            self._require_start()  # they may have changed since
            together(self.world, partial(final.start_from, model, self.config.start))
        self._updates = updates = Updates(held)
        tamper = self._added.tamper
        self._carried = together(self.world, partial(Carried, unsaved))
        self._planned = stop
        self._stop.ends_epoch = planned.ends_epoch
        drawing = [dataset, collate]
        self._loop = loop = Loop(options, self.world, planned, stop, held, units, self.log, tamper, unsaved, drawing)
        loop.observe([updates])  # it is closed whatever comes next
        self._portability.begin(model, self._judged)
        together(self.world, loop.state.others)  # what no checkpoint can hold is refused
        together(self.world, opened.require_known)  # before step 0, where all can be told by one
        together(self.world, flags.require_held)
        start = self._restore(loop)
        if start > updates.first:
            self._portability.watch.end()  # what the first step calls is known from before
        mine = loop.gradients.leaves[self.world.rank]
        keys = sampling.MicroBatches(planned, mine, start, loop.stop)
        samples = self._added.dataset(dataset, self.config.seed)
        sources = data_watch.names_of({"dataset": dataset, "collate": collate, "order": order})
        self._data_watch = data_watch.DataWatch(sources, unsaved)
        loader = loading(self, collate).loader(samples, keys)
        loop.batches = sampling.batches(loader, self.world, making=self._making)
        loop.observe([updates, *self._observers(loop, start), *self._added.observers])
        yield from loop.steps(start)
        if self.world.broadcast_object(bool(self._proof and self._proof.found)):
            with hosts.together(self.world, lambda: self._stop.came, everywhere=True):
                if self._proof:  # it looks for the cause
                    self._proof.require()
        if self._stop.saved is not None:
            together(self.world, self._finish_saving)  # launchers kill the others soon after one has ended
            if self._stop.stops == Beside.stops and not any(self.world.total(self._stop.came)):
                raise self._anew()
            raise self._preempted()

    def _anew(self) -> Anew:
        done = self._stop.saved
        line = f"stopped after step {done} to prove its early parts, which have no room beside it; it goes on then"
        return Anew(line, {"steps": done} | (self._proof.handed() if self._proof else {}))

    def _preempted(self) -> Preempted:
        stop = self._stop
        return Preempted(f"stopped {stop.stops} after step {stop.saved}; the same command goes on from there")

    def _failed_beyond(self, error: BaseException | None) -> Preempted | None:
        """What a run ends with that failed in the step beyond its saved state: nothing is lost."""
        step = self._loop and self._loop.step
        if not step or step.number != self._stop.saved or not isinstance(error, Exception):
            return None
        return Preempted(f"{self._preempted()}. The step after it failed: {type(error).__name__}: {error}")

    def _require_order(self, planned: plan.Plan) -> None:
        """Refuse an order of the owner's that differs at a second call, or on another rank."""
        places = np.arange(min(planned.samples, LOOK))
        orders = planned.order(0), planned.make(0)
        with plan.in_epoch(0):
            once, again = (digest(np.asarray(each.items(places)).tolist()) for each in orders)
        agreement.require_agreement({"order of samples": once}, self.world, "the ranks disagree before step 0:")
        if once != again:
            raise UserError(
                "run.steps(order=...): other samples at a second call: let it depend on the number of samples "
                "and the key alone, such as by samebits.Permutation(samples, key)"
            )

    def _observers(self, loop: Loop, start: int) -> Iterator[Observer]:
        """What looks at each step, in this order: what refuses comes before what writes, and checkpoints last."""
        assert self._keeper and self._repeated
        parallel, lead = self.config.parallel, self.world.is_main
        size = parallel.global_batch // parallel.micro_batches
        assert self._data_watch
        yield self._portability
        yield self._data_watch
        yield logged.Shapes(loop.model, size, self._describe)
        yield self._unsaved
        yield Opened()
        yield Replicas(self.config.integrity.compare_every, self.world, loop.gradients.replicas)
        yield self._stop
        yield self._trace  # it names the phase in which a step differs that is made again
        yield self._repeated
        yield self._metrics
        yield from self._live
        if steps := profile.steps_of(self.config.trace.profile, self._planned):
            yield profile.Profile(steps, self.out, self.world)
        yield Beside(self._proof)
        yield self._keeper
        if lead and self.config.record.progress:
            yield progress.Shown(start, loop.stop, lambda: self._metrics.latest)

    def _describe(self, shapes: dict[str, Any]) -> None:
        if self._folder:
            self._folder.record.describe(shapes=shapes)

    def _restore(self, loop: Loop) -> int:
        """Give model and optimizer the newest valid checkpoint's state; return how many steps are done.

        Ranks that do not see rank 0's disk get its copy. Then all compare their weights, and the record begins: what
        does not fit has been refused before, and left nothing behind.
        """
        folder, sharded = self.out / names.CHECKPOINTS, loop.gradients.sharded
        shared = seen_by_all(self.out, self.world)
        origin = self._origin() if self._folder and self._folder.resumes else None
        there = checkpoint.newest(folder, origin, _report, self.world, shared)
        if there:
            together(self.world, partial(loop.state.put, there))
            if there.stopped is not None:
                loop.stop, loop.stopped = there.step, there.stopped
        first = self._start(loop) if not there else 0
        done = there.step if there else first
        agreement.require_replicas(loop.state.weights(), done, self.world, loop.gradients.replicas)
        together(self.world, lambda: self._folder and self._folder.record)
        outputs = not self.config.compute.compile  # whose modules have no outputs to look at
        anew = self._folder is not None and not self._folder.record.comparable
        together(self.world, lambda: self._trace.begin(loop.state, done, outputs, sharded, first, anew))
        segments = self.world.broadcast_object(together(self.world, partial(self._choose, loop, first)))
        held, noted = ([getattr(each, end) for each in segments] for end in ("first", "stop"))
        saver = None
        if (self.world.is_main or sharded) and not loop.tamper:
            writers = self.world if sharded else ranks.ALONE
            saver = Saver(folder, self._origin(), self.config.checkpoint, self._sync, writers, shared, held)
        self._unsaved = UnsavedState(loop, done, self.config.checkpoint.every, self._note_unsaved)
        # before a checkpoint holds what came of it
        before: list[Callable[[], None]] = [
            partial(flags.require_held, local=self.world.size > 1),
            self._require_data,
            self._carried.require,
            self._unsaved.require,
            self._trace.flush,
        ]
        every = self.config.checkpoint.every
        self._keeper = Keeper(saver, every, loop.state, self._stop, before, held, noted, self._note)
        next_step = self.world.broadcast_object(together(self.world, self._next_step))
        path = self.out / names.NEXT if self._folder and saver else None
        self._repeated = Repeated(path, loop.state if saver else None, self._stop, next_step)
        if self._folder and self._folder.resumes:
            self._folder.record.went_on(done)
            print(f"resumed {self.out} after step {done}", flush=True)
        return done

    def _next_step(self) -> dict[str, Any] | None:
        """What came of the step after the saved state, before the interruption, as far as rank 0 can compare it."""
        record = self._folder and self._folder.record
        if not record or not record.resumed or not record.comparable or not (self.out / names.NEXT).is_file():
            return None
        return read_record(self.out, names.NEXT)

    def _choose(self, loop: Loop, first: int) -> list[Segment]:
        """The parts of the run that are trained again in its end, which were chosen when it began."""
        found = []
        self._unproved = proof.unwanted(self.config)
        if self._folder and not loop.tamper and not self._unproved:
            record, ends = self._folder.record, loop.plan.next_end
            if not (found := [Segment(*each) for each in record.facts.get("segments", [])]):
                found = chosen(self.address.digest, first, loop.stop, ends, self.config.prove)
                record.describe(segments=[[each.first, each.stop] for each in found])
            given = self.project, self.config, self.out, self.world.size, found
            moved = Moved(owners_frames(), loop.state, loop.generators)
            seen = (lambda: self._stop.came), moved.names, self._lent
            self._proof = made.go_on(*seen) if (made := early.made()) else proof.Proof(*given, *seen)
        return found

    def _note(self, step: int, digest: str) -> None:
        if self._folder:
            record = self._folder.record
            record.describe(states=record.facts.get("states", {}) | {str(step): digest})

    def _note_unsaved(self, named: Mapping[str, str]) -> None:
        if self._folder:
            record = self._folder.record
            record.describe(unsaved=record.facts.get("unsaved", {}) | named)

    def _prove(self) -> dict[str, Any]:
        assert self._loop
        return self._proof.make(self._loop.done) if self._proof else proved.none(self._unproved)

    def _lent(self) -> AbstractContextManager[None]:
        """Parts of the run that are trained again on a GPU need its memory."""
        assert self._loop
        kind = self.world.device.type
        return lent(tensors_of(self._loop.state), kind) if kind == "cuda" else nullcontext()

    def _start(self, loop: Loop) -> int:
        """Give model and optimizer the state from which the run starts, if that is asked for; its number of steps."""
        start, first = self.config.start, 0
        if start.state:
            there = checkpoint.start_of(Path(start.run) / names.CHECKPOINTS, start.state, self.world)
            first = there.step
            if first >= loop.stop:
                raise UserError(
                    f"--state: {first} steps are done in {start.run}, and this run is to have {loop.stop}: ask for more"
                )
            together(self.world, partial(loop.state.put, there))
        self._updates.first = self._portability.first = first
        if start.weights and self.world.is_main:
            what = f"its state after step {first}" if first else f"weights {start.weights}"
            print(f"started from {start.run}: {what}", flush=True)
        return first

    def _require_data(self) -> None:
        if self._still:
            self._still.require(local=self.world.size > 1)

    def _sync(self) -> None:
        assert self._folder
        self._folder.sync()
        self._trace.sync()

    def _finish_saving(self) -> None:
        assert self._keeper
        self._keeper.finish()

    def _settle(self) -> None:
        """Return once no checkpoint is being written, so that this process can be forked."""
        if self._keeper and self._keeper.saver:
            self._keeper.saver.join()

    def _making(self) -> AbstractContextManager[object]:
        """Return the context in which the dataset may change itself."""
        return self._data_watch.making() if self._data_watch else nullcontext()

    def log(self, step: int, /, **metrics: float | torch.Tensor) -> None:
        """Record numbers of a step (counted from 0). They are read when the step ends, with all else that is."""
        if self._folder:
            self._metrics.take(step, metrics)

    def log_text(self, text: str, name: str) -> None:
        """Keep a text as a file of this name, such as samples/step-100.txt, below `files/` of the run directory.

        It goes to MLflow with all else. Each rank may call it; rank 0 writes.
        """
        self._keep(name, lambda path: path.write_text(text))

    def log_figure(self, figure: Any, name: str) -> None:
        """Keep a figure of matplotlib, or of what else has `savefig`, in the format that the name ends with."""
        if not hasattr(figure, "savefig"):
            raise UserError(f"run.log_figure(): a {type(figure).__name__} given, a figure with savefig() wanted")
        self._keep(name, lambda path: figure.savefig(path, format=Path(name).suffix[1:] or None))

    def log_artifact(self, path: str | Path, name: str = "") -> None:
        """Keep a copy of a file, under its own name or this one."""
        if not Path(path).is_file():
            raise UserError(f"run.log_artifact(): {path}: no file there")
        self._keep(name or Path(path).name, lambda copy: shutil.copyfile(path, copy))

    def _keep(self, name: str, write: Callable[[Path], object]) -> None:
        require_name(name)
        if self._folder:
            self._folder.record.keep(name, write)

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        assert self._folder
        for name, (before, here) in self._folder.record.log(step, numbers).items():
            if self.config.trace.level == "off":  # these numbers are all that tells two runs apart
                raise contradiction(step, name, before, here)
            self._report_varying(step, name, before, here)
        for each in self._live:
            each.take(step, numbers)

    def _report_varying(self, step: int, name: str, before: float, here: float) -> None:
        """Say once that a logged number does not repeat, though the step has the bits that it had before."""
        if name not in self._varying and not self._has_failed:  # else it follows from that
            self._varying.add(name)
            seen = f"{name} is {here!r} and was {before!r} before the interruption"
            _report(f"step {step}, made again: {seen}: it changes no bit; the record keeps the first one")

    def on_log(self, function: Show) -> Show:
        """Have rank 0 call `function(step, numbers)` with what each step has logged, such as to draw it live.

        Use it as a decorator, before `run.steps`. It decides no bit. If it raises, a line says so, the run goes on, and
        it is not called again. A step that is made again after an interruption is given again.

        Raises:
            UserError: the steps have begun.
        """
        if self._loop:
            raise UserError("run.on_log() came after run.steps(): call it before")
        if self.world.is_main and self._added == Added():  # what else is made of the run is nobody's to follow
            self._live.append(Live(function))
        return function

    def stop(self, reason: str) -> None:
        """Let the run end with the step under way, as if it were the last one: call it after the step's update.

        All ranks call it in the same step: decide by numbers that are the same on each. The receipt states `reason`,
        a line of text, and the loop over `run.steps` comes to its end by itself.

        Raises:
            UserError: there is no step under way, or some rank does not call it; or `reason` is no line of text.
        """
        line = reason.strip() if isinstance(reason, str) else ""
        if not line or len(line.splitlines()) > 1 or len(line) > REASON:
            raise UserError(f"run.stop(): {shown(reason)} given, a reason of one line and {REASON} characters wanted")
        if not self._loop:
            raise UserError("run.stop() came before run.steps(): it ends the run after a step")
        self._loop.stop_after(line)

    def finish(self, /, **metrics: float | torch.Tensor) -> None:
        """Write the weights, the final metrics (and with them how many `steps` were made) and the receipt.

        Raises:
            UserError: steps of the run are left, the run is finished already, or a metric is no number.
        """
        loop = self._loop
        if loop and loop.step:
            raise UserError(
                f"run.finish() came in step {loop.step.number}, before its end: let the loop over run.steps() come to "
                f'its end, without break. To end a run early call run.stop("reason") in place of break'
            )
        if not loop or not loop.done or loop.done != loop.stop:
            done = loop.done if loop else 0
            raise UserError(f"run.finish() came after step {done}: let the loop go through all of run.steps()")
        if self._is_finished:
            raise UserError("run.finish() was called twice: call it once, with all metrics")
        numbers = {name: as_number(name, value) for name, value in metrics.items()}
        together(self.world, opened.require_known)
        together(self.world, self._require_still)
        together(self.world, flags.require_held)
        self._is_finished = True
        self.log(loop.stop - 1, **{"epoch": loop.plan.epoch(loop.stop), **numbers})
        self._metrics.write()
        unsharded = weights.gathered(loop.state, self.out, self.world) if loop.gradients.sharded else loop.model
        together(self.world, self._finish_saving)
        with hosts.together(self.world, lambda: self._stop.came):
            self._end(loop, numbers, unsharded)
        self._added.finished()

    def _end(self, loop: Loop, numbers: Mapping[str, float], unsharded: nn.Module) -> None:
        if self._folder:
            ended = self._ended(loop)
            self._folder.record.describe(**ended, variables=variables.read())
            text, made = {**numbers, "steps": loop.stop}, (loop.model, unsharded)
            self._results = finish(
                self.project,
                self.config,
                self._folder,
                *made,
                text,
                self._trace.root,
                self._prove,
                not loop.tamper,
                _report,
            )
            self._results |= ends(ended, loop.stop)
            self._numbers = {name: progress.number(value) for name, value in numbers.items()}
            for each in self._live:
                each.end(_report)  # the loop, which closes observers, has ended before

    def _ended(self, loop: Loop) -> dict[str, dict[str, Any]]:
        """What the record says of weights that are not those after the last planned step."""
        ended: dict[str, dict[str, Any]] = {}
        if loop.stopped is not None:
            ended["stopped"] = {"reason": without_credentials(loop.stopped), "planned": self._planned}
        for each in loop.state.objects.values():
            if isinstance(each, Best) and each.loaded == loop.stop:
                ended["best"] = {"step": each.step, "value": exact(each.value)}
        return ended

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portability.watch.end()
        flags.let_go()
        refused: RunError | None = self._failed_beyond(error) or shards.of_mixture(error)
        error = refused or error
        if not error and not self._is_finished:
            error = refused = UserError("run.finish() was never called: it writes the weights and the receipt")
        if isinstance(error, RunError):
            # Told now, and SIGTERM only noted until the end: torchrun sends it as soon as one rank has ended.
            error.report()
        else:
            self._stop.restore()
        if not (isinstance(error, RunError) and error.local):
            ranks.leave()  # else the launcher is to see this rank's exit before the others', who miss it in the group
        self._has_failed = error is not None
        if self._loop:
            self._loop.close(error)
        if self._keeper:
            self._keeper.close(error)  # its loop may have ended before: it writes into the folder until here
        if self._proof:
            self._proof.close()
        if self._folder:
            tags = {f"repro.{name}": self._results[name] for name in TAGS if name in self._results}
            patience = 0 if self._stop.came else self.config.tracking.wait_seconds  # who sends SIGTERM is in a hurry
            status = "KILLED" if isinstance(error, Preempted) else "FAILED" if error else "FINISHED"
            tracked = self._folder.end(status, tags, patience) if self._folder.has_begun else "off"
            if not error:
                if self.config.record.finished == "replace":
                    from .record.former import drop_replaced

                    drop_replaced(self.out, _report)
                self._summarise(tracked)
            self._folder.release()
        self._stop.restore()
        if self._loop and isinstance(self._loop.batches, Generator):
            self._loop.batches.close()  # its workers end now; of a loader that is found as garbage they never hear
        if isinstance(error, Anew) and self._stop.came:
            refused = self._preempted()
        if refused:
            raise refused

    def _summarise(self, tracked: str) -> None:
        facts = self._results, self._numbers, {"address": self.address.digest, "tracked": tracked}
        lines = [line for each in facts for line in each.items()]  # a metric may have the name of another fact
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            print(f"{name:{width}}  {value}", flush=True)


def _report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
