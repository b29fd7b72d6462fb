"""What a run leaves on the disk, and how it is read again; the trainer's state (`state_files`) alone needs torch."""

from oblrpo.runs.disk import check_name, check_writable, disk_trouble, locked, sync_folder, write_atomically
from oblrpo.runs.folder import HELD_OUT, Identity, RunFolder, checkpoint_of, from_here, how_to_resume, run_of
from oblrpo.runs.rows import Metrics, heldout_accuracy_of, parsed, read_rows

__all__ = [
    "HELD_OUT", "Identity", "Metrics", "RunFolder", "check_name", "check_writable", "checkpoint_of",
    "disk_trouble", "from_here", "heldout_accuracy_of", "how_to_resume", "locked", "parsed", "read_rows", "run_of",
    "sync_folder", "write_atomically",
]  # fmt: skip
