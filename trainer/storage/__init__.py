"""Files and folders that survive kills, full disks and other writers: atomic replacement, locks, hashes, bounded documents."""
