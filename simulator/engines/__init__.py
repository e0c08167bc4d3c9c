"""The engines: Flower with a real shuffler, and vectorised, without messages."""
