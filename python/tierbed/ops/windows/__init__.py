"""Rows of the forward order's windows in the memory of a device."""
