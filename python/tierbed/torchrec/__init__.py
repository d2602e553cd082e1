"""TorchRec's models on a store: its modules are replaced, its configs and batches are taken.

:func:`replace` puts collections over a store in place of those of a model that exists;
:func:`from_configs` makes one for a model that is built. Both fulfil TorchRec's interfaces: they
return its ``KeyedTensor`` and ``JaggedTensor``, and ``embedding_bag_configs()`` returns what was
given. TorchRec is imported by the first call, and is no dependency of Tierbed.
"""

from __future__ import annotations

from tierbed.torchrec.building import from_configs, replace

__all__ = ["from_configs", "replace"]
