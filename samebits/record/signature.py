"""Signatures of receipts, in OpenSSH's format (PROTOCOL.sshsig), made and checked by ssh-keygen."""

import os
import subprocess
from pathlib import Path

from ..core.errors import RunError, UserError
from .names import RECEIPT, SIGNATURE

PATIENCE = 60  # seconds: a key in hardware waits for a touch
NAMESPACE = "repro-receipt"  # a signature made for another purpose is none of a receipt


def require_key(key: str) -> None:
    """Refuse a configured key that is not there or cannot sign, before a run has begun."""
    if not Path(key).expanduser().is_file():
        raise UserError(
            f"receipt.key: {key} is missing; wanted the file of an ssh key, or nothing to leave it unsigned"
        )
    if reason := _reason("sign", "-n", NAMESPACE, "-f", _place(key), standard_input=b"a trial"):
        raise UserError(
            f"receipt.key: {key} cannot sign: {reason}. If it has a passphrase, hand it to ssh-agent and repeat the "
            f"command: ssh-add {key}"
        )


def sign(folder: Path, key: str) -> None:
    """Sign the receipt in a run directory; the signature lies beside it.

    Raises:
        RunError: there is no ssh-keygen, or it could not use the key.
    """
    words = ("sign", "-n", NAMESPACE, "-f", _place(key), str(folder / RECEIPT))
    (folder / SIGNATURE).unlink(missing_ok=True)  # it would ask whether to overwrite it
    if reason := _reason(*words):
        raise RunError(f"{folder / RECEIPT} is not signed: {reason}. Sign it with: ssh-keygen -Y {' '.join(words)}")


def _place(key: str) -> str:
    return str(Path(key).expanduser())


def _reason(verb: str, *options: str, standard_input: bytes = b"") -> str:
    """Why ssh-keygen could not do it; empty if it could."""
    try:
        done = _ssh_keygen(verb, *options, standard_input=standard_input)
    except (UserError, subprocess.TimeoutExpired) as error:
        return str(error)
    return " ".join(done.stderr.split()) or f"exit code {done.returncode}" if done.returncode else ""


def standing(path: Path, signers: Path | None) -> str:
    """Who signed the receipt in a file, in a line; nobody can tell without `signers`. Raises what `signer` does."""
    if signers:
        return f"signed by {signer(path, signers)}"
    unchecked = f"{SIGNATURE} is not checked (name the keys that you trust with --signers FILE)"
    signed = unchecked if path.with_name(SIGNATURE).is_file() else "not signed"
    return f"{signed}: a consistent receipt proves nothing about its author, anyone can write one"


def signer(path: Path, signers: Path) -> str:
    """Who signed the receipt in a file.

    `signers` is a file of allowed signers, as ssh-keygen(1) describes it.

    Raises:
        UserError: there is no signature, no such file of signers, or no ssh-keygen.
        RunError: the signer is not among the allowed ones, or signed something else.
    """
    signature = path.with_name(SIGNATURE)
    for needed in (signers, signature):
        if not needed.is_file():
            raise UserError(f"{needed}: missing; {'allowed signers' if needed == signers else 'a signature'} wanted")
    found = _ssh_keygen("find-principals", "-s", str(signature), "-f", str(signers))
    if found.returncode:
        raise RunError(f"{signature}: signed by a key that is not among {signers}, or not a signature")
    principal = found.stdout.splitlines()[0].split(",")[0]
    options = ("-n", NAMESPACE, "-I", principal, "-s", str(signature), "-f", str(signers))
    checked = _ssh_keygen("verify", *options, standard_input=path.read_bytes())
    if checked.returncode:
        raise RunError(f"{path}: not what {principal} signed: {' '.join(checked.stderr.split())}")
    return principal


def _ssh_keygen(verb: str, *options: str, standard_input: bytes = b"") -> subprocess.CompletedProcess[str]:
    """Run ssh-keygen to its end. It asks ssh-agent for keys, but no person: it has no terminal and no window."""
    command = ["ssh-keygen", "-Y", verb, *options]
    environ = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "SSH_ASKPASS")}
    environ["SSH_ASKPASS_REQUIRE"] = "never"
    try:
        done = subprocess.run(
            command, input=standard_input, capture_output=True, env=environ, start_new_session=True, timeout=PATIENCE
        )
    except FileNotFoundError:
        raise UserError("ssh-keygen is not installed; it is part of OpenSSH (apt install openssh-client)") from None
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())
