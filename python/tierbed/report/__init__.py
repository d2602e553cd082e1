"""Reports: what a store or a snapshot does, as a page, in a notebook, and as text.

:meth:`tierbed.Store.report` and :meth:`tierbed.Snapshot.report` return a :class:`Report`. Every
number in it was counted by the engine or is computed from recorded lookups; what was not
recorded is named, with the call that records it.
"""

from typing import TYPE_CHECKING

from tierbed._util.lazy import lazy_names

if TYPE_CHECKING:
    from tierbed.report.page import Report
else:
    __getattr__ = lazy_names(__name__, {"page": "Report"})

__all__ = ["Report"]
