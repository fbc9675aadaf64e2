"""What `make` runs: system needs, the virtual environment, the native build.

Standard library only, because it runs before anything is installed.
"""
