"""Tables of a store behind the interfaces of other libraries.

:mod:`tierbed.adapters.dynamicemb` is the external storage of NVIDIA's dynamicemb, below its cache
on the GPU. :mod:`tierbed.adapters.graphbolt` is a feature store of DGL's GraphBolt. Each imports
its library where it is installed, and neither is a dependency of Tierbed.
"""

from __future__ import annotations

__all__: list[str] = []
