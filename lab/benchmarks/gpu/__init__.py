"""What a day on a GPU should show, in one command of nine minutes: `python3 -m lab.benchmarks.gpu` (`make gpu`)."""
