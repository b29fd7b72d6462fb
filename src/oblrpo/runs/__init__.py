"""What a run leaves on the disk, and how it is read again."""

from oblrpo.runs.folder import Metrics, RunFolder
from oblrpo.runs.state_files import check_writable, load_state, write_atomically

__all__ = ["Metrics", "RunFolder", "check_writable", "load_state", "write_atomically"]
