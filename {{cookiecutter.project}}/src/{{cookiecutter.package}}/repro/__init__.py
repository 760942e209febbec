"""The machinery: read it, you need not edit it. Your files import it; it never imports yours.

Each floor imports only from floors below it; `make lint` checks that:

| floor | holds |
|---|---|
| cli | the `repro` command |
| lab | questions asked of runs and of code: verify, diff, replay, compare, audit, doctor. No run imports it |
| run, launch; step, torchrun | what `train.py` holds; how processes start and end |
| training | how the bits are kept: seeds, order, sampling, ranks, sums, agreement, checkpoints, digests, trace |
| machine; records | what a run runs on: switches, canary, numeric environment; what is written down (no torch) |
| asked | what was asked for: settings, content address, data manifest, stages (no torch) |
| project, errors, files, forms, differences, credentials, progress | small parts that every floor may use |
"""

from . import loader as loader  # before any other module is imported
