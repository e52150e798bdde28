"""Where keys and values live: pages, who holds them, and the segments they are reused for.

`pages` alone imports torch. Everything here is called from the engine's worker thread.
"""
