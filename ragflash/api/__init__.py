"""The HTTP server: thin adapters from routes to the library, the answerer and the engine.

It holds no tensors and imports no torch; what it serves is injected through `deps.Services`.
"""
