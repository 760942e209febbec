"""Ranks that others wait for in vain: the others say so, and end."""

import os
import signal

import pytest
from victim import Start, Victim

GONE = "rank 1: lost contact with another rank, or waited parallel.timeout_seconds for it; run the same command again"


def says(victim: Victim, what: str) -> bool:
    """Wait until the training has said something; it may have ended meanwhile."""
    return victim.until(lambda: what in victim.log.read_text()) or what in victim.log.read_text()


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="silent", marks=pytest.mark.long)],
)
def test_lost_rank_ends_the_others_in_plain_words(start: Start, number: signal.Signals) -> None:
    """At once where its end is seen, within the set time where it only falls silent."""
    patience = 900 if number == signal.SIGKILL else 30
    victim = start(f"parallel.timeout_seconds={patience}", ranks=2)
    assert victim.until(lambda: victim.rows() > 3)
    os.kill(victim.process.pid, number)  # rank 0
    assert says(victim, GONE)
    victim.kill()
    assert "Traceback" not in victim.log.read_text()


def test_rank_that_nobody_joins_ends_in_plain_words(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the setting, and what leads to the others."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    victim = start("parallel.timeout_seconds=2")
    assert victim.end() == 1
    said = victim.log.read_text()
    assert "rank 0: the ranks did not all meet within parallel.timeout_seconds; on several hosts GLOO_SOCKET" in said
    assert "Traceback" not in said
