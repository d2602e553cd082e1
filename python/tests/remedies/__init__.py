"""Remedies that errors name: each is raised, followed as it says, and seen to work."""
