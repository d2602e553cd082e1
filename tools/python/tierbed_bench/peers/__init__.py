"""Stores of rows that are asked the same queries under one limit of memory.

:mod:`~tierbed_bench.peers.suite` runs them, each measurement in a process of its own
(:mod:`~tierbed_bench.peers.cell`); :mod:`~tierbed_bench.peers.systems` has a class for each.
"""
