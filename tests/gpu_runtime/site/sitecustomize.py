"""Every Python that starts with STAND_IN set has its libraries loaded, and a jax that believes in a GPU.

jax asks for /dev/nvidia0 before it starts its CUDA client. NVIDIA's own libraries, where their packages are installed,
are found by jax and by the plugin's run path before LD_LIBRARY_PATH is looked at: whoever is loaded first under a
SONAME wins.
"""

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

MODULE = "jax._src.hardware_utils"


class BelieveInGpu(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            module.has_visible_nvidia_gpu = lambda: True

        spec.loader.exec_module = load_and_change
        return spec


if "STAND_IN" in os.environ:
    for library in sorted((Path(os.environ["STAND_IN"]) / "lib").glob("*.so.*")):
        ctypes.CDLL(str(library))
    sys.meta_path.insert(0, BelieveInGpu())
