"""The run: the steps, and what stands around them (`loop`)."""
