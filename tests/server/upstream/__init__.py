"""llama.cpp's own server tests, run against this server.

``plugin.py`` replaces how their server is started and which model it serves; ``applicable.py`` says
which of their tests apply, and why the others do not.
"""
