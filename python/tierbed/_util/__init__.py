"""Helpers of every room: byte sizes, progress bars, reports, saved state, lazy names."""
