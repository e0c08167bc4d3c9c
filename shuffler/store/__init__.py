"""What the shuffler keeps on disk: runs, rounds and their batches, and the rules it holds."""
