"""Modules that exist for the import paths of other packages.

`tile_kernels.compat.mhc.post_kernel` can be imported as `tile_kernels.mhc.post_kernel`, the path
that TileKernels has, and so on for every module in here. Nothing else in the library imports them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = "tile_kernels."
_COMPAT = "tile_kernels.compat."


class _CompatFinder(MetaPathFinder, Loader):
    """Finds `tile_kernels.X` as `tile_kernels.compat.X`, where no other finder found it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if not fullname.startswith(_PACKAGE) or fullname.startswith(_COMPAT):
            return None
        found = importlib.util.find_spec(_COMPAT + fullname.removeprefix(_PACKAGE))
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        found = importlib.import_module(_COMPAT + module.__name__.removeprefix(_PACKAGE))
        copied = {key: value for key, value in vars(found).items() if not key.startswith("__")}
        vars(module).update(copied, __doc__=found.__doc__)
        if hasattr(found, "__all__"):
            vars(module)["__all__"] = found.__all__


def install() -> None:
    """Makes the paths importable; the package does this when it is imported."""
    if not any(type(finder).__name__ == _CompatFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(_CompatFinder())
