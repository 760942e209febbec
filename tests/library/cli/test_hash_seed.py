"""Seeds in processes of their own."""

import pytest
from support import python

from samebits.core.seeds import derive


@pytest.mark.parametrize("hash_seed", ["1", "2", "random"])
def test_seeds_do_not_depend_on_the_hash_seed(hash_seed: str):
    code = "from samebits.core.seeds import derive; print(hash('init'), derive(0, 'sample', 1, 2))"
    done = python("-c", code, env={"PYTHONHASHSEED": hash_seed})
    of_string, seed = done.stdout.split()
    assert int(seed) == derive(0, "sample", 1, 2)
    assert int(of_string) != hash("init")  # the variable did what it does
