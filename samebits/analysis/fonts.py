"""Loading of matplotlib, whose search for fonts is slow and speaks."""

import os
from importlib import import_module
from tempfile import TemporaryDirectory


def load_matplotlib() -> None:
    """Load matplotlib with the fonts that it brings, in place of a list of this machine's that an earlier process left.

    To look for these can take long, which it says on standard error.
    """
    with TemporaryDirectory() as empty:
        os.environ |= {"MPLCONFIGDIR": empty, "MPL_IGNORE_SYSTEM_FONTS": "1"}
        import_module("matplotlib.font_manager")
    del os.environ["MPLCONFIGDIR"]
