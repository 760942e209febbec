"""The library samebits keeps the bits of a training: read it, you need not edit it. It never imports your files.

Each room imports only from rooms below it; `make lint` checks that:

| room | holds |
|---|---|
| cli | the `repro` command |
| analysis | questions asked of runs and of code: verify, diff, replay, compare, audit, doctor. No run imports it |
| run; finish, folder | what `train.py` holds: from an open run directory to the receipt |
| start; trace, checkpoint, tracking | how processes start; observers of the loop, and the uploader |
| environment; record; guards | what a run runs on; what it writes down; what is refused by name |
| address; config; base | what was requested; its keys; files, git, text. These load without torch |
| core | decides bits: seeds, order, sums, ranks, determinism flags, digests, the loop. Nothing else does |
"""

from . import loader as loader  # before any other module is imported
