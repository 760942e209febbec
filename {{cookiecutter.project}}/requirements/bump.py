"""Moves the base images, the apt snapshot and the locks forward together, and says what changed (`make bump`).

python requirements/bump.py [--base TAG@DIGEST] [--server-base TAG@DIGEST] [--snapshot MOMENT] --torch-index URL

The base is an nvidia/cuda tag with its digest, that of the MLflow server a tag of python; a tag alone is looked up with
`docker buildx imagetools inspect`.
The snapshot is a moment such as 20261101T000000Z, later than the base; without one it is today's midnight (UTC).
The locks are written anew with the newest versions that pyproject.toml allows. Then all is checked against another.
"""

import argparse
import datetime
import re
import subprocess
import sys

from check_locks import BASES, DOCKERFILE, ROOT, base_of, misfits, read_locks, seconds

LINES = {name: re.compile(rf"(?m)^ARG {name}=(.*)$") for name in (*BASES, "APT_SNAPSHOT", "SOURCE_DATE_EPOCH")}


class BumpError(Exception):
    """The update cannot be made, for a reason the user can do something about."""


def with_digest(name: str, base: str) -> str:
    """The base of this name with its digest, looked up where it has none."""
    if "@sha256:" not in base:
        try:
            command = ["docker", "buildx", "imagetools", "inspect", base]
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise BumpError(f"{base}: no digest given, and no docker to look it up: {base}@sha256:… wanted") from None
        digest = re.search(r"(?m)^Digest:\s+(sha256:[0-9a-f]{64})$", done.stdout)
        if done.returncode or not digest:
            raise BumpError(f"{base}: no digest found: {' '.join(done.stderr.split())}")
        base = f"{base}@{digest[1]}"
    if not base_of(f"ARG {name}={base}", name):
        raise BumpError(f"{base}: {BASES[name][1]} wanted")
    return base


def put(text: str, values: dict[str, str]) -> str:
    """The Dockerfile's text with other values of these ARGs."""
    for name, value in values.items():
        if match := LINES[name].search(text):
            text = text[: match.start(1)] + value + text[match.end(1) :]
    return text


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """A line for each name whose value is another now."""
    names = sorted(name for name in before | after if before.get(name) != after.get(name))
    return [f"{name}: {before.get(name, 'none')} -> {after.get(name, 'none')}" for name in names]


def state() -> dict[str, str]:
    """What a bump may change, by name."""
    text = (ROOT / DOCKERFILE).read_text()
    found = {name: match[1] for name, line in LINES.items() if (match := line.search(text))}
    return found | {f"{pin.name} ({name})": pin.version for name, lock in read_locks().items() for pin in lock.values()}


def main() -> int:
    """Bump, say what changed, and whether it fits together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", dest="BASE_IMAGE")
    parser.add_argument("--server-base", dest="SERVER_BASE")
    parser.add_argument("--snapshot", default=f"{datetime.datetime.now(datetime.UTC):%Y%m%d}T000000Z")
    parser.add_argument("--torch-index", required=True)
    given = parser.parse_args()
    before, dockerfile = state(), ROOT / DOCKERFILE
    try:
        values = {"APT_SNAPSHOT": given.snapshot, "SOURCE_DATE_EPOCH": seconds(given.snapshot)}
        values |= {name: with_digest(name, base) for name in BASES if (base := getattr(given, name))}
    except BumpError as error:
        print(error, file=sys.stderr)
        return 2
    except ValueError:
        print(f"--snapshot {given.snapshot}: a moment such as 20261101T000000Z wanted", file=sys.stderr)
        return 2
    dockerfile.write_text(put(dockerfile.read_text(), values))
    writer = [sys.executable, str(ROOT / "requirements" / "write_locks.py"), "--upgrade", "all"]
    if code := subprocess.run([*writer, "--torch-index", given.torch_index]).returncode:
        return code
    print(*(changes(before, state()) or ["nothing changed"]), sep="\n")
    if found := misfits():
        print(*found, sep="\n")
        return 1
    print("next: make setup, make test, make repro, make image; then commit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
