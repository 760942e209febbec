"""The loop of a run: its steps, their seeds, and the reports to observers."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .alike import fail_alike
from .errors import Disagreement, RunError, UserError, of_system
from .generators import own_generators, preserved, seed_own
from .objects import LoopObject
from .observer import Ballot, Observer, View
from .options import Options
from .plan import Plan
from .ranks import World
from .seeds import derive, seed_everything
from .shards import Scattered
from .state import State
from .step import Step
from .summing import gradients_of

VERSION, GRADIENT = attrgetter("_version"), attrgetter("grad")
EVENTS = "begin_step", "batch", "gradients", "ballot", "end_step"


class Tamper:
    """Changes what a run computes, to see what comes of it. No config can ask for one.

    A run that has one writes no receipt, and no checkpoint.
    """

    def weights(self, step: int, model: nn.Module) -> None:
        """The first micro-batch of a step is about to be loaded."""

    def batch(self, step: int, leaf: int, batch: Any) -> Any:
        """The micro-batch that takes the place of this one."""
        return batch

    def gradients(self, step: int, model: nn.Module) -> None:
        """The gradients are summed, and nobody has seen them yet."""


class Loop:
    """What the steps of a run share.

    Attributes:
        stop: how many steps the run has; `done`: how many of them are.
        stopped: why the run has fewer steps than were planned, in its owner's words; None where it has all.
        gradients: the way of summing the model's gradients.
        step: the one whose turn it is.
        skipped: whether the last sum was not finite, so that there are no gradients (`compute.nonfinite: skip`).
        batches: one item per micro-batch that this rank runs, in order.
        observers: are told what happens, in this order.
        reason: why the loop ended before its last step, if it did.
        own: the generators of the model, of optimizers and of what else draws, seeded for each micro-batch.
    """

    def __init__(
        self,
        options: Options,
        world: World,
        plan: Plan,
        stop: int,
        state: State,
        units: Sequence[nn.Module] = (),
        log: Callable[..., None] = lambda step, **metrics: None,
        tamper: Tamper | None = None,
        unsaved: Collection[str] = (),
        drawing: Sequence[Any] = (),
    ) -> None:
        """`unsaved` are attributes on which no bit depends; generators in what is `drawing` are seeded, too."""
        self.options, self.world, self.plan, self.stop, self.log = options, world, plan, stop, log
        self.state, self.model, self.optimizers, self.tamper = state, state.model, state.optimizers, tamper
        aliases = state.attributes.aliases()
        self.gradients = gradients_of(state, options.parallel, world, units)
        _require_aliases(aliases, state.attributes.aliases())
        self._called = self.model._compiled_call_impl  # by the owner's own model.compile(), if at all
        if options.compute.compile:
            self.model.compile()
        state.attributes.begin(unsaved)
        self.own = own_generators([*state.attributes.roots, *drawing])
        self.step: Step | None = None
        self.skipped = False
        self.batches: Iterator[Any] = iter(())
        self.done = self._start = 0
        self.stopped: str | None = None
        self.reason: str | None = None
        self._parameters = [*self.model.parameters()]
        self._weights = [*map(_local, self._parameters)]
        self._buffers = [module._buffers for module in self.model.modules() if module._buffers]
        self._watch = ExitStack()
        for each in state.objects.values():
            if isinstance(each, LoopObject):
                each.begin(self)
        self.observe([])

    def observe(self, observers: Sequence[Observer]) -> None:
        """Report to these observers from now on."""
        self.observers = observers
        self._hearers = {
            event: [(place, each, getattr(each, event)) for place, each in enumerate(observers) if _has(each, event)]
            for event in EVENTS
        }
        self._watching = [each for each in observers if _has(each, "watching")]
        self._failure: Exception | None = None
        self._closed = False

    def steps(self, start: int) -> Iterator[Step]:
        """Yield the steps from `start` on; after the last one, or where an observer asks for it, close the observers.

        Raises:
            UserError: the loop forgets a line.
            RunError: an observer's.
        """
        self.done = self._start = start
        for number in range(start, self.stop):
            self.step = step = Step(self, number)
            self._report("begin_step", View(self, number))
            self.seed(number, self.plan.micro_batches)  # for what the loop draws before `backward`
            with self._watch:
                self._enter()
                yield step
            step.require_complete()
            self.step, self.done = None, number + 1
            if self.done < self.stop:
                self._end(number)
            else:
                with preserved():  # else the next step's seed would hide what observers draw
                    self._end(number)
            if self.reason is not None or self.done == self.stop:
                break
        self.close(None)

    def stop_after(self, reason: str) -> None:
        """Let the run end with the step under way, as if it were the last one.

        Raises:
            UserError: no step is under way, its sum is not made, or not all ranks call this.
        """
        if not self.step:
            raise UserError("run.stop() came outside the loop over run.steps(): call it in the step that is to be last")
        if not self.step.is_summed:
            raise UserError(f"step {self.step.number}: run.stop() came before its gradients: call it after them")
        if self.step.is_last or self.stopped is not None:
            return
        self._meet(self.step.number, stopping=1)
        self.stop, self.stopped = self.step.number + 1, reason

    def _end(self, number: int) -> None:
        """Let the observers vote, and report what was counted."""
        if number == self._start:  # in whose ballots ranks meet: those that are elsewhere would not be found
            self._meet(number)
        ballots = self._report("ballot", View(self, number))
        voters = [place for place, each in enumerate(self.observers) if each.stops]
        votes = [self._failure is not None, 0, 0, *(ballots[place].stop for place in voters)]
        counts = [count for ballot in ballots for count in ballot.counts]
        vectors = [ballot.sums for ballot in ballots if ballot.sums is not None]
        own = [scalar for ballot in ballots for scalar in ballot.own]
        vector = torch.cat(vectors) if len(vectors) > 1 else next(iter(vectors), torch.zeros(0, dtype=torch.int64))
        try:
            sums, read = self.world.totals([*votes, *counts], vector, own)
        except RunError as lost:
            raise self._failure or lost from None
        if sums[0]:
            self._fail()
        self._require_together(number, *sums[1:3])
        stops = [self.observers[place].stops for place, vote in zip(voters, sums[3:], strict=False) if vote]
        self.reason = stops[0] if stops else None
        counted, vectors_at, own_at = len(votes), len(votes) + len(counts), 0
        answers = []
        for ballot in ballots:
            of_own = read[own_at : own_at + len(ballot.own)]
            ends = counted + len(ballot.counts), vectors_at + (0 if ballot.sums is None else len(ballot.sums))
            answers.append(([*sums[counted : ends[0]], *sums[vectors_at : ends[1]]], of_own))
            (counted, vectors_at), own_at = ends, own_at + len(ballot.own)
        self._report("end_step", View(self, number, stops=self.reason), answers)

    def require_pass(self, step: int) -> None:
        """A further sum of the step begins: all ranks make it.

        Raises:
            UserError: some do not.
        """
        self._meet(step, further=1)

    def _meet(self, step: int, further: int = 0, stopping: int = 0) -> None:
        """Count the ranks that begin a `further` sum, or end the run; others are in `_end`, and count alike."""
        if self.world.size == 1:
            return
        first, observers = step == self._start, self.observers
        others = 0 if first else sum(each.counts + bool(each.stops) for each in observers)
        sums = torch.zeros(0 if first else sum(each.sums for each in observers), dtype=torch.int64)
        try:
            found, _ = self.world.totals([self._failure is not None, further, stopping, *[0] * others], sums, [])
        except RunError as lost:
            raise self._failure or lost from None
        if found[0]:
            self._fail()
        self._require_together(step, *found[1:3])

    def _require_together(self, step: int, summing: int, stopping: int) -> None:
        size = self.world.size
        if summing not in (0, size):
            raise UserError(
                f"step {step}: {summing} of {size} ranks iterate over it once more than the others: let all ranks "
                f"make the same passes over a step"
            )
        if stopping not in (0, size):
            raise UserError(
                f"step {step}: run.stop() was called on {stopping} of {size} ranks: decide by numbers that are the "
                f"same on all ranks, such as step.loss or what samebits.sums returns"
            )

    def _report(self, event: str, view: View, answers: Sequence[tuple[Any, ...]] = ()) -> list[Ballot]:
        """Report an event. Returns ballots, one for each observer."""
        ballots = [_empty(each, self.world) for each in self.observers] if event == "ballot" else []
        hearers = self._hearers[event]
        if not hearers:
            return ballots
        reach, suspects = self._reach(event, view), []
        before = self._versions(event, reach)
        for place, observer, hear in [*hearers]:
            try:
                said = hear(view, *answers[place]) if answers else hear(view)
                if event == "ballot":
                    ballots[place] = _valid(said, observer)
            except Exception as error:
                self._fails(observer, event, view.step, error, observer.vital)
            suspects.append(observer.name)
            if view.step > self._start and observer is not hearers[-1][1]:
                continue  # from the second step on it is looked for once in each event
            if (after := self._versions(event, reach)) != before:
                wrote = Disagreement(
                    f"step {view.step}: {' or '.join(suspects)} wrote in {event} into weights, gradients, buffers, the "
                    f"batch or the optimizer's state, at which an observer may only look"
                )
                self._fails(observer, event, view.step, wrote)
            before, suspects = after, []
        return ballots

    def report_batch(self, step: int, number: int, leaf: int, tensors: Sequence[Tensor]) -> None:
        """The model is about to see these tensors, in the step's sum of this number."""
        self._report("batch", View(self, step, leaf, tensors, number=number))

    def report_gradients(self, step: int, number: int, loss: Tensor, skipped: bool) -> None:
        """The gradients of the step's sum of this number are there; where they are `skipped`, they go at once."""
        self.skipped = skipped
        self._report("gradients", View(self, step, loss=loss, number=number))

    def _reach(self, event: str, view: View) -> list[Tensor]:
        """The tensors that no observer may write into in this event, as far as a later step depends on them."""
        held = [buffer for home in self._buffers for buffer in home.values() if buffer is not None]
        if event == "batch":
            return [*self._weights, *held, *view.batch]
        states = chain.from_iterable(optimizer.state.values() for optimizer in self.optimizers.all)
        held += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        if event == "gradients":  # later nothing depends on them
            held += [gradient for gradient in map(GRADIENT, self._parameters) if gradient is not None]
            held += [view.loss] if view.loss is not None else []
        return [*self._weights, *(map(_local, held) if self.gradients.sharded else held)]

    def _versions(self, event: str, tensors: Sequence[Tensor]) -> Any:
        """How often they were written into, and which gradients there are."""
        gradients = [*map(id, map(GRADIENT, self._parameters))] if event == "gradients" else []
        try:
            return sum(map(VERSION, tensors)), gradients
        except RuntimeError:  # those that were made in inference mode count nothing
            return sum(each._version for each in tensors if not each.is_inference()), gradients

    def _fails(self, observer: Observer, event: str, step: int, error: Exception, vital: bool = True) -> None:
        """An observer raised, or wrote."""
        if not vital:
            self._hearers = {
                each: [hearer for hearer in hearers if hearer[1] is not observer]
                for each, hearers in self._hearers.items()
            }
            _print_line(f"step {step}: {observer.name} raised in {event}, and is left out: {_said(error)}")
            return
        alone = self.world.size == 1 or event == "end_step"
        if isinstance(error, RunError):
            error.local |= event == "end_step" and self.world.size > 1
            alone |= error.local
        if alone:
            raise error
        self._failure = self._failure or error

    def _fail(self) -> None:
        """An observer failed, here or on another rank: end all alike."""
        error, failure = self._failure, None
        if isinstance(error, RunError):
            failure = error
        elif error is not None:
            of_os = of_system(error) if isinstance(error, OSError) else None
            failure = of_os or RunError(_said(error))
        try:
            fail_alike(self.world, failure)
        except RunError:
            if error is not None and not isinstance(error, RunError | OSError):
                raise error from None  # with its traceback
            raise

    def seed(self, step: int, micro_batch: int, number: int = 0) -> None:
        """Seed all generators for a micro-batch in the step's sum of this number.

        Micro-batches beyond the last one stand for what the loop itself draws.
        """
        place = ("further sum", step, micro_batch, number) if number else ("micro-batch", step, micro_batch)
        seed = derive(self.options.seed, *place)
        seed_everything(seed)
        seed_own(self.own, seed)

    def autocast(self, forward: bool) -> AbstractContextManager[Any]:
        """The arithmetic of a forward pass, or else of the backward pass, which follows what the forward pass did."""
        half = forward and self.options.compute.precision == "bfloat16"
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=half)

    def _enter(self) -> None:
        for observer in self._watching:
            if observer.watches:
                self._watch.enter_context(observer.watching())

    def unwatched(self) -> AbstractContextManager[None]:
        """No observer watches what runs in here, nor do workers that are started inherit its watch."""
        return self._pause() if any(each.watches for each in self._watching) else nullcontext()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._watch.close()
        try:
            yield
        finally:
            self._enter()

    def close(self, error: BaseException | None) -> None:
        """Close the observers, in reverse order, once; from here on the model is its owner's alone."""
        if self._closed:
            return
        self._closed = True
        self.gradients.end()
        self._watch.close()
        with ExitStack() as stack:
            stack.callback(setattr, self.model, "_compiled_call_impl", self._called)  # last
            for observer in self.observers:
                stack.callback(_close, observer, error)


def _require_aliases(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse attributes that were a parameter, which is another tensor now that it is sharded."""
    if lost := [name for name in before if name not in now]:
        raise UserError(
            f"{lost[0]} is the parameter {before[lost[0]]}, which parallel.shard=full replaces: use the parameter "
            f"itself, by the module that has it, or set parallel.shard=optimizer"
        )


def _has(observer: Observer, method: str) -> bool:
    """Whether an observer has such a method of its own."""
    return getattr(type(observer), method) is not getattr(Observer, method)


def _close(observer: Observer, error: BaseException | None) -> None:
    try:
        observer.close(error)
    except Exception as raised:
        if observer.vital:
            raise
        _print_line(f"{observer.name} raised at its end: {_said(raised)}")


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _empty(observer: Observer, world: World) -> Ballot:
    """The ballot of an observer that has nothing to say."""
    sums = torch.zeros(observer.sums, dtype=torch.int64, device=world.device) if observer.sums else None
    return Ballot([0] * observer.counts, sums)


def _valid(ballot: Ballot, observer: Observer) -> Ballot:
    if (len(ballot.counts), 0 if ballot.sums is None else len(ballot.sums)) != (observer.counts, observer.sums):
        raise RunError(f"{observer.name}: its ballot has not the numbers that it declares")
    return ballot


def _local(tensor: Tensor) -> Tensor:
    """The tensor whose version counter counts what is written."""
    if isinstance(tensor, Scattered):
        return tensor.shard.local
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
