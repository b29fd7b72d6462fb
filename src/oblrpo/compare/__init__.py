"""Algorithms x learning rates x seeds: run side by side in worker processes, reported on one page.

`spec` says what is compared, `plan` which runs that takes; `conductor` hands them to the `pool` of `worker` processes
and tells the `board`; `summary` reads what they left, `statistics` judges it, `page` and `table` show it. Only the
workers load torch.
"""
