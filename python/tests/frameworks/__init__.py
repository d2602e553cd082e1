"""Frameworks that models are written in, as their users install them, on a store."""
