"""Exchange between ranks whose rows lie in the memory of GPUs.

As on CPUs: one-sided writes into symmetric memory, signals behind them. Kernels are those of
:mod:`tierbed.dist.kernels`; memory is a :class:`~tierbed.dist.device.heap.DeviceHeap`.
"""
