"""Each remote that is accepted at generation: what DVC pushes there, a clone gets. ssh: tests/hosts/test_ssh.py.

For http DVC does what it does for https, but for the certificate.
"""

import re
import tomllib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from bake import in_venv
from baked import Bake, InstalledProject, run
from remotes import Settings, assert_clone_gets_the_data, bucket, web, with_plugin


def served(scheme: str, folder: Path) -> AbstractContextManager[tuple[str, Settings]]:
    """Start a server of this scheme."""
    if scheme == "s3":
        return bucket(folder)
    if scheme == "path":
        return nullcontext((str(folder / "it's: a folder"), {}))
    return web(folder)


@pytest.mark.parametrize(
    "scheme", ["path", *(pytest.param(scheme, marks=pytest.mark.long) for scheme in ("https", "s3"))]
)
def test_clone_gets_the_data_from_the_remote_of_the_answer(
    bake: Bake, project: InstalledProject, tmp_path: Path, scheme: str
) -> None:
    with served(scheme, tmp_path) as (url, settings):
        baked = bake(dvc_remote=url)
        env = with_plugin(baked, tmp_path) if scheme == "s3" else in_venv(baked.path, baked.env)
        assert_clone_gets_the_data(baked, env, settings, tmp_path)


@pytest.mark.parametrize(
    ("remote", "plugins"),
    [
        ("", []),
        ("/mnt/s3://ssh://", []),
        ("https://host/s3", []),
        ("s3://bucket/path", ["dvc-s3"]),
        ("ssh://host/path", ["dvc-ssh"]),
    ],
)
def test_locks_hold_the_plugin_that_the_answer_needs_and_no_other(
    bake: Bake, project: InstalledProject, remote: str, plugins: list[str]
) -> None:
    """And fit pyproject.toml and each other: the same versions of what they share."""
    baked = bake(dvc_remote=remote)
    assert re.findall(r"^(dvc-(?:s3|ssh))==", baked.text("requirements/run.txt"), re.MULTILINE) == plugins
    checked = run(project.python, "requirements/check_locks.py", cwd=baked.path, env=baked.env)
    assert checked.stdout.startswith("train-cpu, train-cuda, run, dev, server: they fit")
    wanted = tomllib.loads(baked.text("pyproject.toml"))["project"]["optional-dependencies"]["run"]
    assert [line for line in wanted if line.startswith("dvc[")] == [
        f"dvc[{plugin.removeprefix('dvc-')}]>=3.67,<4" for plugin in plugins
    ]
