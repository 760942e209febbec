"""A receipt states what happened, and no byte of it can be changed unseen."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from attempt import inside
from project.config import Config
from server import until
from support import OURS, SECRETS, TESTS, WORD, Trained, python, train_here, trained

from samebits.address.address import digest
from samebits.address.judged import judged
from samebits.address.manifest import sha256_file
from samebits.analysis import verify_receipt
from samebits.base.files import read_json
from samebits.config.settings import Receipt as Signing
from samebits.core.errors import RunError, UserError
from samebits.record import names, signature
from samebits.record.receipt import read
from samebits.run import Run

ADA = "ada@example.org"


def key(folder: Path, name: str) -> Path:
    """A new ssh key without a passphrase."""
    path = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", path], check=True)
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Ada's key, another one, and a file that allows Ada's alone."""
    folder = tmp_path_factory.mktemp("keys")
    public = key(folder, "ada").with_suffix(".pub").read_text()
    key(folder, "mallory")
    (folder / "signers").write_text(f'{ADA} namespaces="repro-receipt" {public}')
    return folder


@pytest.fixture(scope="module")
def signed(prepared: Path, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run whose receipt is signed, with secrets in its environment."""
    out = tmp_path_factory.mktemp("signed") / "run"
    settings = "tracking.enabled=false", f"receipt.key={keys / 'ada'}"
    ended = trained(out, prepared, *settings, **SECRETS)
    assert ended.done.returncode == 0 and ended.done.stderr == ""
    return ended


@pytest.fixture
def run(signed: Trained, tmp_path: Path) -> Path:
    """A copy of its run directory, to be damaged."""
    return Path(shutil.copytree(signed.out, tmp_path / "run"))


def test_receipt_states_what_the_records_say_and_no_secret(signed: Trained):
    content = (signed.out / names.RECEIPT).read_bytes()
    statement = json.loads(content)
    assert content == rfc8785.dumps(statement) and WORD.encode() not in content
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [{"name": "model.safetensors", "digest": {"sha256": signed.weights}}]
    stated, facts = statement["predicate"], read_json(signed.out / names.RUN)
    record = read_json(signed.out / names.ADDRESS)
    assert record.keys() == {"address", "parts", "preimage", "core_files"}
    assert {name: stated[name] for name in record} == record
    assert stated["metrics"] == read_json(signed.out / names.METRICS)
    assert stated["trace"] == facts["tags"]["repro.trace"] and stated["config"] == facts["config"]
    assert stated["informational"]["host"] and stated["informational"]["seconds"] > 0
    assert facts["tags"]["repro.receipt"] == sha256_file(signed.out / names.RECEIPT)
    assert f"receipt    {facts['tags']['repro.receipt']}" in signed.done.stdout


def test_whole_receipt_of_a_known_signer_is_proved(run: Path, keys: Path):
    done = python("-m", "samebits", "verify-receipt", run, "--signers", keys / "signers")
    assert done.returncode == 0, done.stderr
    name, proof, *of_library, files, signer = done.stdout.splitlines()
    assert proof == "proof: none: SAMEBITS_PROVE=never"
    assert name.startswith(f"receipt {sha256_file(run / names.RECEIPT)}: consistent in itself: ")
    checked = "model.safetensors, metrics.json, trace/steps.bin, address.json, environment.json, run.json"
    unstated = "metrics.jsonl, steps.csv: unchecked, because no receipt states them"
    assert files == f"{checked}: as the receipt states; {unstated}"
    assert of_library == judged(OURS, read(run).stated) and signer == f"signed by {ADA}"


def test_refusal_is_one_line_without_a_traceback(run: Path, keys: Path):
    forged(run, lambda statement: FORMS["trace"](statement["predicate"]))
    done = python("-m", "samebits", "verify-receipt", run)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    (run / names.RECEIPT).write_bytes((run / names.RECEIPT).read_bytes()[:-1])
    done = python("-m", "samebits", "verify-receipt", run, "--signers", keys / "signers")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "altered" in done.stderr


def forged(run: Path, change: Callable[[Any], Any]) -> None:
    """Change the statement in a receipt, and write it as a run would."""
    statement = json.loads((run / names.RECEIPT).read_bytes())
    change(statement)
    (run / names.RECEIPT).write_bytes(rfc8785.dumps(statement))


def another_metric(statement: Any) -> None:
    statement["predicate"]["metrics"]["accuracy"] = 0.99


def another_seed(statement: Any) -> None:
    statement["predicate"]["preimage"]["seed"] = 1


def another_seed_hashed_anew(statement: Any) -> None:
    another_seed(statement)
    stated = statement["predicate"]
    stated["config"]["seed"] = stated["preimage"]["seed"]
    stated["parts"] = {name: digest(part) for name, part in stated["preimage"].items()}
    stated["address"] = digest(stated["preimage"])


REASONS = {
    another_seed: "address is not the hash of its preimage",
    another_metric: f"not what {ADA} signed",
    another_seed_hashed_anew: f"not what {ADA} signed",
}


@pytest.mark.parametrize("change", REASONS, ids=lambda change: change.__name__)
def test_changed_statement_is_refused_with_the_reason(change: Callable[[Any], None], run: Path, keys: Path):
    forged(run, change)
    with pytest.raises(RunError, match=REASONS[change]):
        verify_receipt.report(OURS, run, keys / "signers")


def test_changed_byte_is_refused_with_the_reason(run: Path, keys: Path):
    path = run / names.RECEIPT
    path.write_bytes(path.read_bytes().replace(b",", b", ", 1))
    with pytest.raises(RunError, match="it is not canonical JSON"):
        verify_receipt.report(OURS, run, keys / "signers")


FILES = names.WEIGHTS, names.METRICS, names.STEP_ROWS, names.ADDRESS, names.ENVIRONMENT


@pytest.mark.parametrize("name", FILES)
def test_other_file_than_stated_is_refused(name: str, run: Path):
    content = bytearray((run / name).read_bytes())
    place = next(place for place in range(len(content) // 2, len(content)) if chr(content[place]) in "01")
    content[place] ^= 1
    (run / name).write_bytes(content)
    with pytest.raises(RunError, match=f"{name}: altered or another run's"):
        verify_receipt.report(OURS, run, None)


LIES = {
    names.WEIGHTS: lambda statement: statement["subject"][0]["digest"].update(sha256="0" * 64),
    names.METRICS: lambda statement: statement["predicate"]["metrics"].update(accuracy=0.999),
    names.STEP_ROWS: lambda statement: statement["predicate"].update(trace="0" * 48),
}


@pytest.mark.parametrize("name", LIES)
def test_forged_statement_is_refused_beside_the_files_and_not_called_proved_alone(name: str, run: Path, tmp_path: Path):
    forged(run, LIES[name])
    with pytest.raises(RunError, match=f"{name}: altered or another run's"):
        verify_receipt.report(OURS, run, None)
    shutil.copyfile(run / names.RECEIPT, tmp_path / names.RECEIPT)
    _, *_, missing, last = verify_receipt.report(OURS, tmp_path, None)
    assert name in missing and "not beside the receipt" in missing
    assert last == "not signed: a consistent receipt proves nothing about its author, anyone can write one"


def test_signature_that_is_not_checked_proves_nothing(run: Path):
    last = verify_receipt.report(OURS, run, None)[-1]
    assert "is not checked" in last and "--signers FILE" in last and "proves nothing about its author" in last


def test_run_without_a_trace_is_not_said_to_lack_one(run: Path):
    forged(run, lambda statement: statement["predicate"].update(trace=None))
    assert not any("steps.bin" in line for line in verify_receipt.report(OURS, run, None))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *(
            (key, value, f"states another {key} than its preimage")
            for key, value in (("seed", 1), ("train.learning_rate", 0.1), ("data.test_percent", 30))
        ),
        ("determinism.relax", ["nnpack"], "relaxes other flags than its environment"),
    ],
)
def test_config_that_is_not_that_of_the_address_is_refused(key: str, value: object, message: str, run: Path):
    """No hash is over the keys as they are listed for the reader."""
    forged(run, lambda statement: statement["predicate"]["config"].update({key: value}))
    with pytest.raises(RunError, match=f"altered: its config {message}"):
        verify_receipt.report(OURS, run, None)


def hashed_anew(environment: dict[str, Any]) -> None:
    """As one who edits a preimage would."""
    environment["environment"] = digest(environment["preimage"])


ENVIRONMENTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "class": (lambda environment: environment.update({"class": "cuda/0123456789abcdef"}), "environment.class is cuda/"),
    "promise": (lambda environment: environment.update({"class": "cpu-portable/torch-9"}), "environment.class is cpu-"),
    "threads": (lambda environment: environment["preimage"].update(threads=2), "environment is not the hash"),
    "hidden": (
        lambda environment: (environment["preimage"].update(threads=2), hashed_anew(environment)),
        "environment.class is cpu-portable/",
    ),
    "relaxed": (
        lambda environment: (environment["preimage"].update(relaxed=["nnpack"]), hashed_anew(environment)),
        "environment.class is cpu-portable/",
    ),
    "before": (lambda environment: environment.update(before=[{}]), "environment is not the hash of its preimage"),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environment_that_does_not_follow_from_its_preimage_is_refused(name: str, run: Path):
    change, words = ENVIRONMENTS[name]
    forged(run, lambda statement: change(statement["predicate"]["environment"]))
    with pytest.raises(RunError, match=f"altered: {words}"):
        verify_receipt.report(OURS, run, None)


def test_class_of_a_release_of_torch_that_nobody_here_knows_is_accepted(run: Path):
    """Its arithmetic is another one; all else is derived as ever."""

    def older(environment: dict[str, Any], name: str = "cpu-portable/torch-2.0.0+cpu", **keys: Any) -> None:
        preimage = environment["preimage"]
        preimage |= {"torch": {"version": "2.0.0+cpu"}, "cpu": preimage["cpu"] | {"arithmetic": "0" * 64}, **keys}
        hashed_anew(environment)
        environment["class"] = name or f"cpu/{digest(preimage)[:16]}"

    for name, keys in (("cpu-portable/torch-2.0.0+cpu", {}), ("", {}), ("", {"threads": 2})):
        forged(run, lambda statement, name=name, keys=keys: older(statement["predicate"]["environment"], name, **keys))
        read(run)
    forged(run, lambda statement: statement["predicate"]["environment"].update({"class": "cpu-portable/torch-2.0.0"}))
    with pytest.raises(RunError, match=r"environment\.class"):
        read(run)


MORE = {"name": "poison.bin", "digest": {"sha256": "0" * 64}}
SUBJECTS = {
    "another": lambda statement: statement["subject"].append(MORE),
    "renamed": lambda statement: statement["subject"][0].update(name="poison.bin"),
    "annotated": lambda statement: statement["subject"][0].update(uri="https://example.org"),
    "digest": lambda statement: statement["subject"][0]["digest"].update(sha1="0" * 40),
}


@pytest.mark.parametrize("change", SUBJECTS)
def test_subject_is_the_weights_alone(change: str, run: Path):
    forged(run, SUBJECTS[change])
    with pytest.raises(RunError, match=r"model\.safetensors alone with its SHA-256 wanted"):
        verify_receipt.report(OURS, run, None)


FORMS = {
    "code.commit": lambda stated: stated["code"].update(commit="--output=/tmp/x"),
    "code.patch": lambda stated: stated["code"].update(patch="../x"),
    "trace": lambda stated: stated.update(trace=7),
    "metrics": lambda stated: stated.update(metrics=[]),
    "preimage": lambda stated: stated.update(preimage=[]),
    "config": lambda stated: stated.pop("config"),
}


@pytest.mark.parametrize("key", FORMS)
def test_what_no_run_writes_is_refused_by_its_key(key: str, run: Path):
    forged(run, lambda statement: FORMS[key](statement["predicate"]))
    with pytest.raises(UserError, match=rf"{names.RECEIPT}: {key}: (.* seen, .* wanted|missing)\.?$"):
        verify_receipt.report(OURS, run, None)


def sign(run: Path, key: Path, namespace: str = "repro-receipt") -> None:
    (run / names.SIGNATURE).unlink()
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-n", namespace, "-f", key, run / names.RECEIPT], check=True)


def test_signature_of_another_key_or_for_another_purpose_is_refused(run: Path, keys: Path, tmp_path: Path):
    sign(run, keys / "mallory")
    with pytest.raises(RunError, match="signed by a key that is not among"):
        verify_receipt.report(OURS, run, keys / "signers")
    mallory = (keys / "mallory.pub").read_text()  # whom readers trust under Ada's name, but for something else
    (tmp_path / "signers").write_text(f'{ADA} namespaces="another-purpose" {mallory}')
    with pytest.raises(RunError):
        verify_receipt.report(OURS, run, tmp_path / "signers")
    sign(run, keys / "ada", namespace="git")
    with pytest.raises(RunError):
        verify_receipt.report(OURS, run, keys / "signers")


def test_missing_signature_is_refused_where_signers_are_named(run: Path, keys: Path):
    (run / names.SIGNATURE).unlink()
    assert verify_receipt.report(OURS, run, None)[-1].startswith("not signed")
    with pytest.raises(UserError, match="a signature wanted"):
        verify_receipt.report(OURS, run, keys / "signers")


def test_key_that_is_lost_on_the_way_costs_the_signature_and_not_the_run(
    config: Config,
    keys: Path,
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    lost, run = tmp_path / "lost", tmp_path / "run"
    monkeypatch.setattr(signature, "require_key", lambda key: None)
    requested = inside(config, prepared, workers=0)
    train_here(requested.model_copy(update={"receipt": Signing(key=str(lost))}), run)
    assert "is not signed: " in capsys.readouterr().err
    assert verify_receipt.report(OURS, run, None)[-1].startswith("not signed")


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    """A key with a passphrase."""
    path = key(tmp_path, "locked")
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "a passphrase", "-f", path], check=True)
    return path


# In a session with a terminal of its own, as a person's: prints why the key is refused.
ON_A_TERMINAL = """
import os, pty, sys
from pathlib import Path
pid, terminal = pty.fork()
if pid == 0:
    sys.path.insert(0, sys.argv[1])
    import support
    from samebits.core.errors import UserError
    from samebits.record.signature import require_key
    try:
        require_key(sys.argv[2])
        print("it signs", flush=True)
    except UserError as refused:
        print(refused, flush=True)
    os._exit(0)
try:
    while said := os.read(terminal, 4096):
        sys.stdout.buffer.write(said)
except OSError:
    pass
os.waitpid(pid, 0)
"""


def test_locked_key_is_refused_before_the_run_and_no_terminal_asked(locked: Path):
    command = [sys.executable, "-c", ON_A_TERMINAL, TESTS, locked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"DISPLAY": ":9"})
    said = done.stdout.strip()
    assert said.startswith(f"receipt.key: {locked} cannot sign: ") and "\n" not in said, said
    assert said.endswith(f"hand it to ssh-agent and repeat the command: ssh-add {locked}")


@pytest.mark.parametrize(("name", "message"), [("key", "cannot sign: "), ("nowhere", "nowhere is missing")])
def test_key_that_cannot_sign_is_refused_before_the_run(
    name: str, message: str, config: Config, prepared: Path, keys: Path, tmp_path: Path
):
    (tmp_path / "key").write_text("no key at all")
    requested = inside(config, prepared).model_copy(update={"receipt": Signing(key=str(tmp_path / name))})
    with pytest.raises(UserError, match=message), Run(OURS, requested, tmp_path / "run"):
        raise AssertionError("the run has begun")
    assert not (tmp_path / "run").exists()
    signature.require_key(str(keys / "ada"))  # the control


def test_locked_key_that_an_agent_holds_signs(locked: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "ask").write_text("#!/bin/sh\necho a passphrase\n")
    (tmp_path / "ask").chmod(0o700)
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / "agent"], stdout=subprocess.DEVNULL)
    try:
        until((tmp_path / "agent").exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        asking = {"SSH_ASKPASS": str(tmp_path / "ask"), "SSH_ASKPASS_REQUIRE": "force"}
        subprocess.run(["ssh-add", "-q", locked], check=True, env=os.environ | asking)
        signature.require_key(str(locked))
        signature.sign(run, str(locked))
    finally:
        agent.kill()
        agent.wait()
    (tmp_path / "signers").write_text(f"{ADA} {locked.with_suffix('.pub').read_text()}")
    assert verify_receipt.report(OURS, run, tmp_path / "signers")[-1] == f"signed by {ADA}"
