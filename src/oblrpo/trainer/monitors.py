"""The watch over a run while it trains: what it finds is reported once, and some of it ends the run."""

from __future__ import annotations

from typing import Any

from oblrpo.diagnosis import CONDITIONS, Facts, Watch
from oblrpo.diagnosis.of_rewards import same_reward

MOST_SKIPPED = 5  # steps in a row without a finite gradient after which a run ends, or after half of its steps


class Monitors:
    """What a run has shown so far, looked at after every step."""

    def __init__(
        self, facts: Facts | None = None, most_skipped: int = MOST_SKIPPED, stop_on_collapse: bool = False
    ) -> None:
        self.stop = ""  # why the run is to end after this step, in a sentence; empty if it continues
        self.watch = Watch(facts or Facts())
        self.most_skipped, self.stop_on_collapse = most_skipped, stop_on_collapse
        self.skipped = 0  # steps in a row without any update, because something was not finite

    def observe(self, metrics: dict[str, Any], skipped: str = "") -> list[str]:
        """Return the new warnings after a step; `skipped` says what was not finite in it, if it was skipped.

        A step without an update because all rewards agree is no such step. An outage is reported when it has
        started and when it has ended. A resumed run shows its earlier steps again, to stay quiet on them.
        """
        self.stop, what = "", skipped or "gradient"
        new, outages = self.watch.observe(metrics | {"overflow": what}), self.watch.course.outages
        agreed = metrics.get("grad_norm") == 0
        no_update = metrics.get("skipped") and metrics.get("learning_rate") == 0 and not agreed
        self.skipped = self.skipped + 1 if no_update else 0
        if self.skipped >= self.most_skipped:
            self.stop = (
                f"the last {self.skipped} steps were skipped (a {what} was NaN or infinite): they have not changed the "
                f"policy. If rewards in completions/step_{metrics['step']}.jsonl are outliers, fix the reward and "
                "continue with --resume --accept-changed. Else lower learning_rate, and start a new run."
            )
        elif self.stop_on_collapse:
            holding = {}
            for cause in self.watch.findings:
                follows = [] if cause.condition.statistic is same_reward else cause.follows
                for each in (cause, *follows):
                    if each.until == self.watch.course.step:
                        said = (f"{one.name}: {one.sentence}" for one in dict.fromkeys((cause, each)))
                        holding[each.condition] = f"{' '.join(said)} {cause.cure}"
            self.stop = next((holding[each] for each in CONDITIONS if each.collapse and each in holding), "")
        warned = [each for each in new if each.wrong and not each.condition.updated]
        outage = next((each for each in self.watch.findings if each.condition.statistic is same_reward), None)
        news = [outage if outages.lasts else outages.news] if outages.news and outage else []
        return [*(f"{outage.name}: {each}" for each in news if outage), *(f"{each.name}: {each}" for each in warned)]
