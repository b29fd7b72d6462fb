"""Tasks that only the laboratory trains on, by the names that `oblrpo train --task` takes from any folder."""

from pathlib import Path

ADDITION, COUNTDOWN, INSTRUCTIONS = (
    f"{Path(__file__).parent / name}.py:{name.title()}Task" for name in ("addition", "countdown", "instructions")
)
