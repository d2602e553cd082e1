"""Names of a package that are imported when they are first used.

Importing Tierbed stays quick, because what only some programs need, such as the HTTP server, is
not loaded with the package. A package that has such names lists them for type checkers under
``TYPE_CHECKING`` and takes its ``__getattr__`` from :func:`lazy_names`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

__all__ = ["lazy_names"]


def lazy_names(package: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Returns the ``__getattr__`` of a package (PEP 562).

    Args:
        package: The package's ``__name__``.
        names: Names with blanks between, by the module of the package that has them; none where
            the module itself is the name.
    """
    homes = {name: module for module, told in names.items() for name in told.split() or [module]}

    def find(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{home}")
        return module if home == name else getattr(module, name)

    return find
