"""Tests with the libraries that rows are used with; without them they skip."""
