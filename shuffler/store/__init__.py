"""What the shuffler keeps: runs, rounds and their batches, the public record, and its rules."""
