"""Environments of episodes: what their tools are, and the processes or threads that they live in."""

from oblrpo.environments.hosts import Environments, Host

__all__ = ["Environments", "Host"]
