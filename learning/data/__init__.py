"""Real datasets by name, and which of their records belong to which user."""
