"""One process of a training that is measured, started by rounds.py in the folder of a generated project.

python measure/rank.py WAY SLOWER OUT KEY=VALUE...
"""

import sys

import peers
from pace import Pace


def ours(slower: float) -> None:
    """The project's own training, from its command line on; only the beginning of each step is seen."""
    from repro_project import PROJECT
    from repro_project.config import Config
    from repro_project.repro.start import launch

    config, out = launch.begin(PROJECT, Config, trains=True)
    pace = Pace(slower)
    from repro_project import train

    class Paced(train.Run):
        """A run whose steps wait for the pace."""

        def steps(self, *words, **named):
            for step in super().steps(*words, **named):
                pace.begins()
                yield step

    train.Run = Paced
    launch.call(PROJECT, train.train, config, out)


def main() -> None:
    """Train as the first word says."""
    way, slower, out, *settings = sys.argv[1:]
    if way in peers.PEERS:
        peers.train(way, settings, float(slower))
    else:
        sys.argv[1:] = [*(word for setting in settings for word in ("--set", setting)), "--out", out]
        ours(float(slower))


if __name__ == "__main__":
    main()
