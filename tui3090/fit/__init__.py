"""`tui3090 fit`: which batch size and which techniques fit the card, and how fast each is, measured.

`command` goes through the table's cells; `planning` says which cell is next and which are not worth running;
`process` runs a cell in a process of its own, which is `cell`; `prediction` is the arithmetic of what a cell will
need; `table` writes it all down. Only `cell` and `probe`, which run in that process, import torch.
"""
