"""Lookups in the autograd graph of torch: custom operators, and which backward steps the rows."""
