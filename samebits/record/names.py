"""The names of all files and folders in a run directory, each in one place."""

# written at the start of a run
ADDRESS = "address.json"  # the content address and all that went into it
ENVIRONMENT = "environment.json"  # the numeric environment and all that went into it
RUN = "run.json"  # what the run is, and how it went
PATCH = "code.patch"  # what the code had beyond its commit
LOCK = "run.lock"  # which process writes here now

# written while it runs
METRIC_ROWS = "metrics.jsonl"  # the numbers that were logged
CHECKPOINTS = "checkpoints"
TRACE = "trace"
STEP_ROWS = f"{TRACE}/steps.bin"  # the digests of each step
TENSOR_ROWS = f"{TRACE}/tensors.bin"  # the digests of each tensor at each step
TENSOR_COLUMNS = f"{TRACE}/tensors.json"  # the names of their columns
VALUES = f"{TRACE}/values.safetensors"  # the tensors of one step, as rank 0 saw them

NEXT = "next.json"  # digests of the step after the state that was saved when the run was stopped
PROOF = ".proof"  # a part of the run, while it is trained again; hidden, for all in it is removed
LOGGED_FILES = "files"  # what the loop logs beside numbers; run.json has their names

# written at its end
WEIGHTS = "model.safetensors"
PICKLED = "model.pth"  # the model as a whole, for MLflow
CODE = "code.zip"  # the package that it needs
METRICS = "metrics.json"
CONTRADICTION = "contradiction.json"  # where a part of the run, trained again, had other bits
CURVES = "steps.csv"  # what each step logged, as a table
RECEIPT = "receipt.json"
SIGNATURE = "receipt.json.sig"

# written by the upload to MLflow
UPLOAD = "tracking.json"  # how far it came
UPLOAD_LOG = "tracking.log"
UPLOAD_LOCK = "tracking.lock"

EARLIER = "earlier"  # finished runs that had this directory before: another content address, or another environment
REPLACED = "replaced-"  # begins the name of one there that goes when the run in its place has finished

LOGGED = (PICKLED, CODE)  # what MLflow has in the LoggedModel
OUTCOME = (METRIC_ROWS, METRICS, CURVES, WEIGHTS, CONTRADICTION, RECEIPT, SIGNATURE, PATCH)
REMOVED = (*OUTCOME, *LOGGED, NEXT)  # when a new run begins
FILES = {*REMOVED, ADDRESS, ENVIRONMENT, RUN, LOCK, UPLOAD, UPLOAD_LOG, UPLOAD_LOCK}  # all that lie beside the folders


def rank_profile(rank: int) -> str:
    """The file of what its operations took in the steps that `trace.profile` names."""
    return f"{TRACE}/profile{rank:04d}.json"


def rank_values(rank: int) -> str:
    """The file of the tensors of one step that this rank alone saw."""
    return f"{TRACE}/values{rank:04d}.safetensors" if rank else VALUES


def rank_rows(rank: int) -> str:
    """The file of what differs between ranks by nature: host, time spent in each phase."""
    return f"{TRACE}/rank{rank:04d}.jsonl"
