"""Environment variables on which no bit may depend: those of ranks, of jobs, of credentials and of records."""

import re

from .redact import SECRET

RANKED = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|GROUP_\w+|ROLE_\w+|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+")
# What a variable is of, by the form of its name. A new kind is one row.
UNFIT = {
    "a rank": RANKED,
    "a job": re.compile(
        r"(FLUX|KUBERNETES|LSB|MPI|OMPI|PALS|PBS|PMIX?|RAY|SGE|SLURM)_\w+|CUDA_VISIBLE_DEVICES|HOSTNAME|JOB_ID"
    ),
    "credentials or an account": re.compile(rf"\w*({SECRET.pattern})\w*|AWS_\w+", re.IGNORECASE),
    "how a run is recorded": re.compile(r"(DVC|MLFLOW|SAMEBITS|WANDB)_\w+"),
    "where the code lies": re.compile("(OLD)?PWD|PYTHONPATH"),
}


def unfit(name: str) -> str:
    """What a variable of this name is of, if no bit may depend on it; else nothing."""
    return next((kind for kind, form in UNFIT.items() if form.fullmatch(name)), "")
