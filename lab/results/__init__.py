"""Every training run that a figure of the pages rests on: planned, run where it stopped, kept as lines of CSVs."""
