"""Algorithms x learning rates x seeds: trained side by side, reported on one page.

`spec` says what is compared and `plan` which runs that takes. `conductor` starts each run in a process of its own
(`training`). `summary` reads what they left, `statistics` tests it, `page`, `charts` and `table` show it. Only the
training processes load torch.
"""
