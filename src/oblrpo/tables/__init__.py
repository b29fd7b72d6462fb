"""What is known of baselines, schedules, ratios, algorithms and metrics, a row each; the standard library only."""
