"""The reliability campaign: seeded kills, power losses, faults, damage and requests, counted.

Laboratory, not product. ``python -m campaign`` with ``python/tests`` on the path, or
``make campaign``; docs/project/campaign.md says how to read and to repeat what it prints.
"""
