"""Numbers of the tiny configuration (`run_world`)."""

USERS, RATE, CLIP_NORM, NOISE, ADJACENCY = 60, 0.5, 0.8, 1.0, "zero-out"
