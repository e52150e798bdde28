"""Drafting and its verification: several tokens a forward, the same output."""
