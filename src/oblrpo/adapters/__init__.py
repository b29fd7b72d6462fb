"""OBLR-PO inside other people's trainers."""
