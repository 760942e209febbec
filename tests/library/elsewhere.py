"""A module of the project in another folder, or of its library, in a process that has this project's modules loaded.

tests/elsewhere.py ROOT MODULE ARGUMENTS
"""

import os
import runpy
import sys

from warm import PACKAGE, forget_tests

if __name__ == "__main__":
    root, module, *arguments = sys.argv[1:]
    for name in [name for name in sys.modules if name.partition(".")[0] in (PACKAGE, "samebits")]:
        del sys.modules[name]
    os.chdir(root)
    sys.path[:0] = here = [f"{root}/src", f"{root}/vendor"]
    os.environ["PYTHONPATH"] = os.pathsep.join(here)
    sys.argv = [module, *arguments]
    forget_tests()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
