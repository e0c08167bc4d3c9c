"""The ways to play a run's rounds. CONTRIBUTING.md says what a new one touches."""
