"""What a person sees of a run: the console while it trains, one HTML page, charts and the shell of all pages."""
