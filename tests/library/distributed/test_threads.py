"""The digests of a training do not depend on the number of threads."""

import pytest
from support import python

IN_THREADS = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
from samebits.core.digest import tensor_digest
numbers = torch.randint(-(2**62), 2**62, (1 << 20,), generator=torch.Generator().manual_seed(0))
print(torch.get_num_threads(), int(tensor_digest(numbers)), int(tensor_digest(numbers[::3].to(torch.int32))))
"""


@pytest.mark.long
def test_number_of_threads_does_not_matter():
    printed = {threads: python("-c", IN_THREADS, threads).stdout.split() for threads in ("1", "2")}
    assert [p[0] for p in printed.values()] == list(printed)
    assert len({tuple(p[1:]) for p in printed.values()}) == 1, printed
