"""Post-training of language models with OBLR-PO: the variance-optimal baseline and the SNR learning rate."""

__version__ = "0.1.0"
