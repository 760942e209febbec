"""The run directory when a run begins: nothing is removed, written over or taken over that is not this run's."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
from clone import commit, project_in
from project.config import Config
from support import OURS, as_earlier_release
from warm import PACKAGE

from samebits.address.address import ContentAddress, digest
from samebits.base.files import read_json, write_json
from samebits.core.arithmetic import description
from samebits.core.errors import UserError
from samebits.record import names, opening
from samebits.record.former import drop_replaced
from samebits.record.opening import opener, require_run_directory

Begin = Callable[..., Path]
SAVED = f"{names.CHECKPOINTS}/000000002-{'a' * 16}"
OWNERS = ("notes.txt", f"{names.TRACE}/notes.txt", f"{names.CHECKPOINTS}/best.pt", f"{SAVED}/best.pt")


def environment(cpu: str = "one", non_portable: tuple[str, ...] = (), model: str = "a model") -> dict[str, Any]:
    """What environment.json holds of a run; `non_portable` operations are known once its first step is made."""
    added = {"model": model, "non_portable": sorted(non_portable)} if non_portable else {}
    preimage = {"image": None, "cpu": {"kind": cpu} | added}
    informational = {"cpu": model, "non_portable": dict.fromkeys(non_portable, "a line")}
    stated = {"environment": digest(preimage), "class": f"cpu/{cpu}"}
    return stated | {"preimage": preimage, "informational": informational}


ENVIRONMENT = environment()
CODE = {"commit": None, "dirty": None, "patch": None}


def address(seed: int) -> ContentAddress:
    core = {"arithmetic": 1}
    return ContentAddress({"config": {}, "code": {}, "core": core, "data": {"files": []}, "lock": {}, "seed": seed})


@pytest.fixture
def begin(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """A function that begins a run of this seed in tmp_path/run and, if it is to, ends it."""
    monkeypatch.setattr(opening, "code_state", lambda project: (CODE, b""))  # git takes its time

    def begin(seed: int, end: bool = True, here: dict[str, Any] = ENVIRONMENT, **record: str) -> Path:
        out = tmp_path / "run"

        def calling(non_portable: Mapping[str, str]) -> dict[str, Any]:
            of_here = environment(here["preimage"]["cpu"]["kind"], (*non_portable,), here["informational"]["cpu"])
            return of_here["preimage"]

        requested = config.model_copy(update={"record": config.record.model_copy(update=record)})
        require_run_directory(OURS, out)
        opened = opener(OURS, requested, out, address(seed), here, calling, print)()
        for file in (names.STEP_ROWS, names.rank_rows(0), f"{SAVED}/state.json"):
            (out / file).parent.mkdir(parents=True, exist_ok=True)
            (out / file).write_text(str(seed))
        if end:
            (out / names.WEIGHTS).write_text(f"weights of {seed}")
            (out / "evaluation.json").write_text("the owner's")
            opened.end("FINISHED", {})
            if requested.record.finished == "replace":
                drop_replaced(out, print)
        return out

    return begin


def test_unfinished_run_of_an_earlier_release_is_named_with_its_commit(begin: Begin):
    """The address of such a run states the files of core."""
    out = begin(seed=0, end=False)
    new = {"preimage": address(0).preimage, "core_files": {"ARITHMETIC": "0" * 64, "step.py": "1" * 64}}
    write_json(out / names.ADDRESS, as_earlier_release(new))
    facts = read_json(out / names.RUN)
    write_json(out / names.RUN, facts | {"code": {"commit": "c" * 40, "dirty": False, "patch": None}})
    with pytest.raises(UserError) as refused:
        begin(seed=0)
    message = str(refused.value)
    core = description(read_json(out / names.ADDRESS)["preimage"]["core"])
    start = f"{out} holds an unfinished run of another content address (core: {core} there, arithmetic 1 here). "
    assert message.startswith(f"{start}To finish that one, repeat the command with its code of commit {'c' * 12}. To ")
    assert "To have this one here, give --fresh, or move" in message and "\n" not in message


def files(folder: Path) -> dict[str, str]:
    """The contents of all files below a folder, by name."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def of_run(contents: dict[str, str]) -> dict[str, str]:
    """Those that are kept of a finished run."""
    left = (names.CHECKPOINTS, names.EARLIER, "evaluation.json", *OWNERS)
    return {name: text for name, text in contents.items() if not name.startswith(left)}


def weights(out: Path) -> dict[str, str]:
    """Whose weights lie where in a run directory."""
    return {name: text for name, text in files(out).items() if name.endswith(names.WEIGHTS)}


def test_finished_run_of_another_address_is_kept_whole(begin: Begin, capsys: pytest.CaptureFixture[str]):
    out = begin(seed=0)
    before = files(out)
    begin(seed=1, end=False)
    (kept,) = (out / names.EARLIER).iterdir()
    assert kept.name == f"{address(0).digest[:16]}-{read_json(kept / names.RUN)['id'][:8]}"
    assert f"it is kept in {kept}" in capsys.readouterr().out
    assert files(kept) == of_run(before)
    here = files(out)
    assert names.WEIGHTS not in here and here["evaluation.json"] == "the owner's"
    assert here[names.STEP_ROWS] == "1" and here[f"{SAVED}/state.json"] == "1"


def test_of_several_each_is_kept_and_the_same_address_begins_in_its_place(begin: Begin):
    for seed in (0, 1, 1, 0):
        out = begin(seed)
    kept = sorted((out / names.EARLIER).iterdir())
    assert sorted(path.joinpath(names.WEIGHTS).read_text() for path in kept) == ["weights of 0", "weights of 1"]


THE_SAME = [
    ({}, {}),
    (environment(non_portable=("aten.sin",)), environment()),  # the first step, which is still to come, will show it
]
ANOTHER = [
    (0, {}, environment("two")),
    (1, {}, environment()),
    (1, {}, environment("two")),
    (0, environment(non_portable=("aten.sin",)), environment(model="another model")),
    (0, environment(non_portable=("aten.sin",)), environment("two")),
]


@pytest.mark.parametrize(("finished", "end"), [*product(("keep", "refuse", "replace"), (True, False))])
def test_finished_run_of_another_address_or_environment_is_lost_only_to_a_finished_one(
    finished: str, end: bool, begin: Begin, tmp_path: Path
):
    for before, after in THE_SAME:  # the same run is made again in its place
        begin(0, here=before or ENVIRONMENT)
        out = begin(0, end=end, here=after or ENVIRONMENT, finished=finished)
        assert weights(out) == ({names.WEIGHTS: "weights of 0"} if end else {}) and not (out / names.EARLIER).exists()
        shutil.rmtree(out)
    for seed, before, after in ANOTHER:
        out = begin(0, here=before or ENVIRONMENT)
        there = of_run(files(out))
        if finished == "refuse":
            which = "content address" if seed else "numeric environment"
            said = f"holds a finished run of another {which} .* record.finished is refuse"
            with pytest.raises(UserError, match=said):
                begin(seed, end=end, here=after, finished=finished)
            assert of_run(files(out)) == there
        else:
            begin(seed, end=end, here=after, finished=finished)
            kept = {folder.name: files(folder) for folder in (out / names.EARLIER).glob("*")}
            assert list(kept.values()) == ([] if finished == "replace" and end else [there])
            assert not end or files(out)[names.WEIGHTS] == f"weights of {seed}"
            if finished == "replace" and not end:  # the next start goes on, and then the older one goes
                begin(seed, here=after, finished=finished)
                assert weights(out) == {names.WEIGHTS: f"weights of {seed}"} and not (out / names.EARLIER).exists()
        shutil.rmtree(out)


def test_what_others_put_into_its_folders_stays_where_it_is(begin: Begin):
    """Whether it is the same run that begins, or another one, which is kept, or replaced."""
    out = begin(0)
    for seed, finished in ((0, "keep"), (1, "keep"), (2, "replace"), (3, "replace")):
        for name in OWNERS:
            (out / name).write_text(f"until {seed}")
        begin(seed, finished=finished)
        here = files(out)
        assert [here.pop(name) for name in OWNERS[:3]] == [f"until {seed}"] * 3
        left = f"{names.CHECKPOINTS}/left-{Path(SAVED).name}{f'-{seed + 1}' if seed else ''}/best.pt"
        assert here[left] == f"until {seed}"
        assert here[f"{SAVED}/state.json"] == str(seed) and OWNERS[3] not in here
    assert weights(out) == {
        names.WEIGHTS: "weights of 3",
        **{name: "weights of 0" for name in weights(out) if name.startswith(names.EARLIER)},
    }
    assert len(weights(out)) == 2


def test_names_of_kept_runs_do_not_collide(begin: Begin):
    out = begin(0)
    begin(1)
    (kept,) = (out / names.EARLIER).iterdir()
    for name, text in files(kept).items():  # somebody puts it back
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text)
    begin(1)
    assert sorted(path.name for path in (out / names.EARLIER).iterdir()) == [kept.name, f"{kept.name}-2"]


def test_unfinished_run_of_another_address_is_refused_with_three_ways(begin: Begin, tmp_path: Path):
    out = begin(0, end=False)
    (tmp_path / "run-2").mkdir()
    with pytest.raises(UserError) as refused:
        begin(1)
    first, *ways = str(refused.value).split(". To ")
    assert first == f"{out} holds an unfinished run of another content address (seed: 0 there, 1 here)"
    assert ways == [
        "finish that one, repeat the command with --set seed=0",
        f"leave it as it is, begin this one elsewhere: --out {tmp_path / 'run-3'}",
        f"have this one here, give --fresh, or move that one away: mv {out} {tmp_path / 'run-unfinished'}",
    ]
    begin(0)  # the control


def test_crash_while_a_run_is_kept_loses_nothing(begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At every rename in turn."""
    rename, crashes, whole = Path.rename, 0, False
    while not whole:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        out = begin(seed=0)
        wanted = of_run(files(out))
        left = crashes

        def crash(path: Path, target: Path) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return rename(path, target)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "rename", crash)
            begin(seed=1)
            whole = True
        begin(seed=1)  # the start after the crash
        (kept,) = (out / names.EARLIER).iterdir()
        assert files(kept) == wanted, crashes
        crashes += 1
    assert crashes == 9  # one for each of seven renames of files, one for the folder, and none


def test_link_in_place_of_a_folder_is_refused_and_its_target_stays(begin: Begin, tmp_path: Path):
    out = begin(seed=0)
    for name, inside in ((names.CHECKPOINTS, f"{SAVED}/state.json"), (names.TRACE, names.STEP_ROWS)):
        (out / name).rename(tmp_path / name)
        (out / name).symlink_to(tmp_path / name)
        with pytest.raises(UserError, match=f"{name}: a link seen, a folder of this run's own wanted"):
            begin(seed=1)
        assert (tmp_path / inside).read_text() == "0"
        (out / name).unlink()
    begin(seed=1)  # the control


def test_what_cannot_be_removed_stops_the_run(begin: Begin, monkeypatch: pytest.MonkeyPatch):
    out = begin(seed=0)

    def busy(path: Path, missing_ok: bool = False) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    said = r"state.json: of an older run, and not removable \(Device or resource busy"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=said):
        patch.setattr(Path, "unlink", busy)
        begin(seed=1)
    assert (out / names.WEIGHTS).read_text() == "weights of 0"
    begin(seed=1)  # the control


@pytest.mark.parametrize("name", ["notes.txt", "trace", "checkpoints", "params.yaml"])
def test_folder_with_other_files_and_no_run_is_refused(name: str, tmp_path: Path):
    (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"^{tmp_path}: {name} seen and no run.json, an empty folder or a run's wanted"):
        require_run_directory(OURS, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_folder_of_outputs_alone_is_not_refused(tmp_path: Path):
    """As after a clone, or after a crash in the first instant."""
    for name in (names.LOCK, names.ADDRESS, f"{names.ENVIRONMENT}.part", ".gitignore"):
        (tmp_path / name).touch()
    for folder in (tmp_path, tmp_path / "none", OURS.root / "artifacts"):
        require_run_directory(OURS, folder)


def test_project_itself_is_no_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`--out ""`, where a variable of a script was empty."""
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "mine").touch()
    (tmp_path / "params.yaml").touch()
    monkeypatch.chdir(tmp_path)
    out = click.Path(path_type=Path).convert("", None, None)
    with pytest.raises(
        UserError, match=r"^\.: params\.yaml, trace seen and no run\.json, an empty folder or a run's wa"
    ):
        require_run_directory(OURS, out)
    assert Path("trace", "mine").is_file()


# ---- uncommitted code


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A project with a commit."""
    source = tmp_path / "own" / "src" / PACKAGE
    source.mkdir(parents=True)
    (source / "model.py").write_text("WIDTH = 1\n")
    (source / "old.py").write_text(f"OLD = '{SECRET_OF['a token']}'\n")
    (tmp_path / "own" / ".gitignore").write_text("ignored.pem\n")
    commit(tmp_path / "own")
    return tmp_path / "own"


# put together here, so that no scanner takes them for real ones
SECRET_OF = {
    "a private key": f"-----BEGIN {'OPENSSH'} PRIVATE KEY-----",
    "an AWS key": f"key = 'AKIA{'Q7' * 8}'",
    "a token": f"token: ghp_{'a1B2' * 9}",
}
SECRETS = [
    *(("notes.txt", text, kind) for kind, text in SECRET_OF.items()),
    ("model.py", SECRET_OF["a token"], "a token"),
    ("aws.ini", f"aws_secret_access_key = {'abc/' * 10}", "an AWS key"),
    (".env", "HOST=x", "a file of settings and passwords"),
    (".env.local", "HOST=x", "a file of settings and passwords"),
    ("credentials.json", "{}", "a file of credentials"),
    ("id_ed25519", "x", "a private key"),
]


def opened(own: Path, config: Config, out: str = "run") -> list[str]:
    """What is told when a run of the project begins."""
    message: list[str] = []
    here = ENVIRONMENT["preimage"]
    opener(project_in(own), config, own / out, address(0), ENVIRONMENT, lambda non_portable: here, message.append)()
    return message


@pytest.mark.parametrize(("name", "text", "kind"), SECRETS)
def test_secret_stays_out_of_the_record(name: str, text: str, kind: str, own: Path, config: Config):
    (own / "src" / PACKAGE / name).write_text(f"before\n{text}\nafter\n")
    with pytest.raises(UserError) as refused:
        opened(own, config)
    line = str(refused.value)
    assert line.startswith(f"src/{PACKAGE}/{name}: looks like {kind}, ") and ".gitignore" in line and "\n" not in line
    assert text not in line and not (own / "run").exists()


def test_uncommitted_files_that_enter_the_record_are_named(own: Path, config: Config):
    source = own / "src" / PACKAGE
    assert opened(own, config, "clean") == []
    for name in ("model.py", "credentials.py", ".env.example", "token.py", "ignored.pem"):
        (source / name).write_text("def token(key): return key  # no secret: sk-learn, hf_hub, AKIA\n")
    (source / "ignored.pem").write_text(SECRET_OF["a private key"])
    (source / "old.py").unlink()  # what it held was committed
    (own / "README.md").write_text("not read by a run")
    (line,) = opened(own, config)
    new = ", ".join(f"src/{PACKAGE}/{name}" for name in (".env.example", "credentials.py", "token.py"))
    assert line == f"{names.PATCH} keeps files that are not committed: {new}"
    assert "PRIVATE KEY" not in (own / "run" / names.PATCH).read_text()
