"""The machinery: seeds, order, shards, switches, records. Read it; you need not edit it.

Floors, each importing only from those below it:

| floor | files | |
|---|---|---|
| 1 | errors, files, seeds, order, manifest, settings, address | pure: no torch |
| 2 | determinism, canary, digest, fingerprint | facts about this process |
| 3 | world, parallel, sampling, checkpoint, preflight | training |
| 4 | launch, record, progress, tracking, run | one run, from start to summary |
| 5 | lab, cli | checks over finished runs; the `repro` command |
"""
