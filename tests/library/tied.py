"""A sharded model with tied embeddings; tests/test_recipes.py runs this on a project with the language recipe."""

from pathlib import Path

import pytest
from warm import Warm

WORLDS = [("none", None), *((shard, ranks) for shard in ("none", "optimizer", "full") for ranks in (2, 3))]
KEYS = "train.steps=4", "tracking.enabled=false"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs lie."""
    return tmp_path_factory.mktemp("tied")


@pytest.mark.parametrize(("shard", "ranks"), WORLDS)
def test_tied_embeddings_have_one_digest(shard: str, ranks: int | None, folder: Path):
    """And one trace, whatever a rank holds of them."""
    keys = [word for key in (*KEYS, f"parallel.shard={shard}") for word in ("--set", key)]
    out, message = folder / f"{shard}-{ranks}", folder / f"{shard}-{ranks}.err"
    code = Warm(*keys, "--out", str(out), out=message, err=message, ranks=ranks).wait()
    assert code == 0, message.read_text()
    assert ("99.5% of the weights are sharded" in message.read_text()) == (shard == "full")
    for name in ("model.safetensors", "trace/steps.bin"):
        assert (out / name).read_bytes() == (folder / "none-None" / name).read_bytes(), name
