"""What a run leaves on the disk, and how it is read again."""

from oblrpo.runs.folder import Metrics, RunFolder, read_rows
from oblrpo.runs.state_files import load_state, write_atomically

__all__ = ["Metrics", "RunFolder", "load_state", "read_rows", "write_atomically"]
