"""Learning curves of our estimators and verl's own on the toy job: `python -m tests.verl.support.learning FOLDER`."""

import shutil
import sys
from pathlib import Path

from tests.verl.support import launch
from tests.verl.support.task import make_data, make_model

ACTOR = "actor_rollout_ref.actor"
OURS = {
    "trainer.v1.trainer_mode": "oblr_po",
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum",
    f"{ACTOR}.policy_loss.loss_mode": "gpg",
}
"""The block of docs/verl.md."""
SHRUNK = OURS | {"algorithm.adv_estimator": "oblr_po_shrunk"}
RUNS = {
    "oblr_po": OURS,
    "oblr_po_shrunk": SHRUNK,
    "oblr_po_shrunk-exact": SHRUNK | {"+oblrpo.score_norms": "exact"},
    "oblr_po_shrunk-debiased": SHRUNK | {"+oblrpo.schedule": "debiased"},
    "oblr_po_shrunk-fixed": SHRUNK | {"+oblrpo.schedule": "off"},
    "grpo": {},
    "opo": {},
    "optimal_token_baseline": {"trainer.use_v1": False, f"{ACTOR}.calculate_sum_pi_squared": True},
}


def curve(lines: dict[int, dict[str, float]], key: str) -> str:
    """Means over five steps each."""
    values = [lines[step][key] for step in sorted(lines) if key in lines[step]]
    parts = [values[start : start + 5] for start in range(0, len(values), 5)]
    return " ".join(f"{sum(part) / len(part):.3g}" for part in parts)


def main(folder: Path, names: list[str]) -> None:
    """Run them one after the other, 25 steps each on one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        make_model(folder / "model")
        make_data(folder)
    for name in names:
        run = folder / name
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        (run / "model").symlink_to(folder / "model")
        (run / "train.parquet").symlink_to(folder / "train.parquet")
        code, printed = launch.run(run, 1, 25, timeout=3000, **{"algorithm.adv_estimator": name} | RUNS[name])
        if code:
            error = [line for line in printed.splitlines() if "Error" in line][-1:]
            print(f"{name}: exit code {code}; {error}", flush=True)
            continue
        lines = launch.metrics(run)
        print(f"{name}: reward {curve(lines, 'critic/score/mean')}", flush=True)
        for key in ("actor/lr_used", "actor/snr", "timing_s/old_log_prob", "timing_s/update_actor"):
            print(f"    {key} {curve(lines, key)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:] or list(RUNS))
