"""Documents, retrieval, quotes and answers."""
