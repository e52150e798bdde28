"""The engine: requests in, tokens and events out.

Reading order: `request` (what crosses the border), `core` (the step), `scheduler`, `sequence`,
`sampler`, `worker`, `client`. Only `batch`, `runner`, `sampler`, `chooser`, `core` and `build`
import torch.
"""
