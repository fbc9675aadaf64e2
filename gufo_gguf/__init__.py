"""A local server for hybrid GGUF models whose cache remembers exact states."""

__version__ = "0.1.0"
