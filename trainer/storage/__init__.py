"""Files that survive kills, full disks and concurrent writers: atomic replacement, locks, hashes,
and bounded documents.
"""
