"""What is known of metrics, a row each, for whoever logs, reads, draws or explains them; no torch."""
