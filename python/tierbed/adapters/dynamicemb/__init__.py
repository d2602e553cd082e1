"""External storage of NVIDIA's dynamicemb: its tables are on the SSD, its cache on the GPU.

dynamicemb trains rows in its cache. It asks the storage for what the cache lacks, and gives it what
the cache evicts. A row comes and goes as one vector: weights, then optimizer state. The store keeps
these vectors as rows of a table of open vocabulary, and never trains them itself.

Source: recsys-examples v26.06.01, ``corelib/dynamicemb/dynamicemb/types.py`` (``Storage``), and
the callers in ``batched_dynamicemb_function.py``, ``batched_dynamicemb_tables.py`` and
``key_value_table.py``. Where the callers ask for other things than the class says, the callers are
followed: ``find`` returns eight values, and ``_state`` is read of any storage.
"""

from __future__ import annotations

from tierbed.adapters.dynamicemb.storage import TierbedStorage, external_storage

__all__ = ["TierbedStorage", "external_storage"]
