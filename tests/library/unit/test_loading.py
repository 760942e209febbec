"""Modules are loaded without a look for garbage."""

import gc

import pytest

from samebits.base import loading


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_looked_for_while_modules_load_and_all_is_as_before_afterwards(enabled: bool):
    (gc.enable if enabled else gc.disable)()
    frozen = gc.get_freeze_count()
    try:
        with loading.unsearched():
            kept = [[] for _ in range(9)]
            assert not gc.isenabled()
        assert gc.isenabled() == enabled and gc.get_freeze_count() > frozen + len(kept)
    finally:
        gc.enable()


def test_what_is_made_later_is_found_by_those_who_look_for_its_holders():
    """As for a schedule that refers to an optimizer: both come after the modules."""
    loading.load("json")
    held = [object()]
    holder = {"held": held}
    assert any(each is holder for each in gc.get_referrers(held))
