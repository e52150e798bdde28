"""From bytes to text with an address for every character.

Imports nothing of ragflash and never opens a network connection. The parts, in the order in
which a document passes them: `sniff`, `parsers`, `document`, `chunk`; `normalise` serves search
and quote checking, `pool` runs the parsers in a child process.
"""
