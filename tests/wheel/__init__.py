"""What is built, in environments of its own: `make test-wheel`."""
