"""Environments that are tensor programs: WarpBeast's, and host.py for the others."""
