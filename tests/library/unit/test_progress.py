"""Where there is no terminal, progress is a table: every name and every number keeps its column."""

import re

import pytest

from samebits.base import progress


def lines(
    capsys: pytest.CaptureFixture[str], stop: int, news: dict[int, dict[str, float]], start: int = 0
) -> list[str]:
    """What is printed of steps that bring these numbers."""
    latest: dict[str, float] = {}
    for step in progress.shown(start, stop, lambda: latest):
        latest.update(news.get(step, {}))
    return capsys.readouterr().out.splitlines()


def test_every_number_keeps_its_column_and_new_ones_come_last(capsys: pytest.CaptureFixture[str]):
    news = {step: {"loss": 10.0 / (step + 1) ** 3, "learning_rate": 0.004 * (1 - step / 100)} for step in range(100)}
    news[30] |= {"epoch": 9.9861, "accuracy": 0.95}
    news[60] |= {"epoch": 10.0139, "accuracy": 1.0}
    news[70] |= {"skipped": 1}
    news[80] |= {"loss": 1234567.8, "learning_rate": -1.5e-7}
    printed = lines(capsys, 100, news)
    assert len(printed) == 10
    for name, count in (("loss", 10), ("learning_rate", 10), ("epoch", 7), ("accuracy", 7), ("skipped", 3)):
        found = [match for line in printed if (match := re.search(rf"\b{name} \S+(  |$)", line))]
        assert len(found) == count
        assert len({match.start() for match in found}) == 1
    assert all(re.match(r"step [ 1]\d0/100   0:00:\d\d +\d+/s   0:00:\d\d left  loss ", line) for line in printed)
    assert printed[0].endswith("  loss 0.01000     learning_rate 0.003640")


def test_resumed_run_shows_the_rest_and_the_last_step(capsys: pytest.CaptureFixture[str]):
    assert [line.split()[1] for line in lines(capsys, 25, {}, start=21)] == ["22/25", "24/25", "25/25"]


def test_rate_and_time_left_are_those_of_this_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A step that takes long has a line of its own, as somebody who reads a log expects."""
    clock = iter(range(0, 10**6, 40))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    printed = lines(capsys, 100, {}, start=90)
    assert [line.split()[1] for line in printed] == ["92/100", "94/100", "96/100", "98/100", "100/100"]
    assert printed[0] == "step  92/100   0:01:20    0.025/s   0:05:20 left"


def test_run_that_ends_early_shows_its_last_step(capsys: pytest.CaptureFixture[str]):
    shown = progress.shown(0, 1000, dict)
    for _ in range(8):
        next(shown)
    shown.send(True)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step    8/1000 ") and line.endswith("0:00:00 left")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (675, "675"),
        (0.99164, "0.9916"),
        (12.5, "12.5000"),
        (-123456.7, "-1.235e+05"),
        (0.0, "0.0000"),
        (0.024934, "0.02493"),
        (0.004, "0.004000"),
        (1.4819e-05, "1.482e-05"),
        (-0.0001234, "-0.0001234"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_number_keeps_what_counts(value: float, shown: str):
    assert progress.number(value) == shown
