"""Simulators and cost models: caches, memory, SSDs, exchanges between GPUs, prices."""
