"""Tensor operations of ragflash, one folder each: checks, a plain torch reference, a kernel.

A folder's `__init__.py` holds its one public function. Importing a module has no effects: a
device is chosen by the tensors that are passed, never at import.
"""
