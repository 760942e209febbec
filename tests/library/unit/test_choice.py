"""The ways in which the parts of a run are trained again."""

import pytest
from project.config import Config

from samebits.prove import choice
from samebits.prove.choice import Choice


@pytest.mark.parametrize("workers", [0, 1, 2, 8])
def test_end_of_an_epoch_and_of_the_run_have_loader_workers(
    workers: int, config: Config, monkeypatch: pytest.MonkeyPatch
):
    """Workers have none of the changes that the loop has made to the dataset; no part has as many as the run."""
    monkeypatch.setattr(choice, "places", lambda device: 3)
    run_choice = Choice(1, workers, "none")
    chosen = [choice.choices(number, config, run_choice)[0] for number in range(3)]
    assert all(part.workers != workers for part in chosen)
    assert all(part.workers > 0 for part in chosen[1:])
