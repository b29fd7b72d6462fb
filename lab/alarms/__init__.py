"""Does `oblrpo diagnose` find what is wrong, and nothing where nothing is? Synthetic logs, healthy and ill."""
