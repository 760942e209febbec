"""Why a part of a run differs that was trained again: the first circumstance that does it, else the fewest together."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..base.text import short, some
from ..environment import variables
from .choice import Choice
from .setting import VARIABLES, Row

FRESH = "a fresh process"  # on which a run may depend, beside its ranks and `setting.ROWS`
LONGEST = 60  # characters of a name, which may hold a key of a dictionary
AGAIN = (
    "Any other process differs: it depends on a clock, on os.urandom, on a generator made without a seed, on which "
    "thread is first, on where objects lie in memory, on the folder or the name of the run, or on a file that it "
    "changes. Leave that out, or let prepare.py write it"
)
FORGOTTEN = (
    "Any process differs that goes on from the run's state: a later step, or what follows the last step, depends on "
    "what no checkpoint holds, such as a variable of a module, a closure, a cache or a file of an earlier step. Give "
    "it to run.steps(state=...), or compute it from the step"
)
APART = (
    "Each rank and each loader worker has variables, generators and caches of its own, and objects at other places in "
    "memory: compute what decides bits from the step, or in the dataset from the item's index"
)
SHARDED = (
    "Where tensors are sharded, a rank holds parts of them: leave out what reads or changes whole ones, such as a norm "
    "or a hook"
)


def cause_of(
    choice: Choice,
    own: Choice,
    rows: Sequence[Row],
    differs: Callable[[Choice, Sequence[Row]], bool],
    is_first: bool,
    moved: Callable[[], Sequence[str]],
) -> tuple[str, str]:
    """The cause of a part that differs when this choice trains it with these rows changed, and what to do.

    `differs` says whether it does in another way, such as the run's `own`. `is_first` says whether it is the first part
    of the run, which goes on from no state, and `moved` names what the owner's code holds that has changed.
    """
    if (choice == own and not rows) or differs(own, []):
        return FRESH, AGAIN if is_first else f"{FORGOTTEN}{_changes(moved())}"
    for way in _ways(choice, own):
        if differs(way, []):
            name, is_cut = way.beside(own), way.ranks > 1 and way.shard != own.shard
            means = SHARDED if is_cut else f"{APART}{_changes(moved())}"
            return name, f"It depends on how it is trained: {name}. {means}"
    for row in rows:
        if differs(own, [row]):
            names = variables.read() if row.name == VARIABLES else []
            read = f": {some(names)}" if names else ""
            return row.name, f"It depends on its surroundings ({row.name}{read}): {row.means}"
    way, least = own if differs(own, rows) else choice, list(rows)
    for row in rows:
        fewer = [each for each in least if each is not row]
        least = fewer if differs(way, fewer) else least
    name = ", ".join([*filter(None, [way.beside(own)]), *(row.name for row in least)])
    return name, f"It depends on these together: {name}"


def _ways(choice: Choice, own: Choice) -> list[Choice]:
    """Ways to train it: with the workers of this choice alone, on its ranks alone, and all of it."""
    shard = own.shard if choice.ranks > 1 else choice.shard
    ways = replace(own, workers=choice.workers), replace(own, ranks=choice.ranks, shard=shard), choice
    return [way for way in dict.fromkeys(ways) if way != own]


def _changes(names: Sequence[str]) -> str:
    shown = some([short(name, LONGEST) for name in names])
    return f". Changed since the run began, and saved in no checkpoint: {shown}" if names else ""
