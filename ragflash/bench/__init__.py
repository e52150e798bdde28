"""Measurements that users can repeat: one module a benchmark, each with a `measure` function.

`record` says what a result holds, `ragflash.cli.bench` names every benchmark once.
"""
